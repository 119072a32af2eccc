"""A launch on a host: prepared programs, their steps and barriers, and the thread that enqueues them."""
