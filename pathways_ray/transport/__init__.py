"""How processes talk: the message types, gRPC streams that batch by themselves, and the device-to-device path."""
