"""Unmodified JAX programs on the cluster: a server of JAX's IFRT proxy protocol that is a client of the runtime."""
