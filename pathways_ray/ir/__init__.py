"""The sharded dataflow graph: its types, its verifier, its printer, its passes. Pure: nothing here talks to anybody."""
