"""The user's side: sessions, slices, arrays, decorated functions, programs. Needs JAX and gRPC, never Ray."""
