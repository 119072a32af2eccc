"""PTD-P training as in Megatron-LM: pipeline, tensor and data parallelism, as programs of `pathways_ray`."""
