"""The controller: sessions, programs, the order of launches over islands, ownership of buffers."""
