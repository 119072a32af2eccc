"""Python beside the devices: calls of host functions, in a process of their own for each session."""
