"""Descriptions that planning and training share: a model, a parallel configuration, a cluster.

    model      the shape of a transformer, its parameters and FLOPs
    parallel   sizes of a parallel configuration: their rules, and the layers of each stage
    cluster    devices, networks, operations, software; all constants of the planner's time model
    files      TOML files read, settings and texts written
    load       models, clusters and software from TOML files: shipped ones (`presets/`) by name, others by path

A size, a default or a rule that both the planner and the trainer have stands here, so that what is planned is what is
trained. Everything here is pure, and imports no JAX and no Ray.
"""
