"""The sharded dataflow graph: its types, its verifier, its printer, its passes. Pure: no I/O."""
