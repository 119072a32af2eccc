"""From exported functions to executables: the allowlist, the checker's process, the compiler, and XLA's CPU backend."""
