"""Bring-up: topology, placement groups, the actors of a runtime, and `pw.init`."""
