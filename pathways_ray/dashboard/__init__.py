"""The live page of a runtime: a process of its own that looks at the controller, and serves browsers on loopback."""
