"""Observers of a host: traces, timelines, the order check and the crash log."""
