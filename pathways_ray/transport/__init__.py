"""Communication between processes: message types, gRPC streams and TCP links that batch, credentials, TLS."""
