"""The dispatch benchmark against peers: each in its own environment, all in the same session, measured in turn.

`environments` builds them, `protocol` is what a peer speaks, `process` holds its process, `rounds` measures,
`benchmark` is the command. Every other file is one peer; `trainers` and its two peers are for `benchmarks.training`.
Run it with `python -m benchmarks.peers`; see benchmarks/README.md.
"""
