"""A host: it prepares plans, runs them with device futures, keeps the buffers, and moves shards to other hosts."""
