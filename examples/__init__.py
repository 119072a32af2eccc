"""Examples, smallest first; each runs as `python -m examples.NAME`, and says more in its first lines.

`figure2` and `ping_pong` are programs over several islands, `jax_training` knows of JAX alone, `elastic_training`
survives the loss of a host, `search` trains sixteen networks at a time, `rl` learns from what it samples, and
`language_model` trains `byte_transformer` as a pipeline. `first_steps.ipynb` is a notebook; `train/` has files for
`pathways-train`.

The `main(session=None, ...)` of `figure2`, `ping_pong` and `language_model` uses a runtime that runs already, where it
is given a session; the others start what they need.
"""
