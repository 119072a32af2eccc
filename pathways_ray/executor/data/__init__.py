"""Arrays on a host: the buffer store, uploads and fetches of clients, and edges between hosts."""
