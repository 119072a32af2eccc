"""The dispatch benchmark against peers: each in its own environment, all in the same session, measured in turn.

`environments` builds them, `protocol` is what a peer speaks, `process` holds its process, `rounds` measures, `report`
prints. Everything else is one peer for each file. Run it with `python -m benchmarks.peers`; see benchmarks/README.md.
"""
