"""`pathways-train`: makes token files, and trains models on them with pipeline, tensor and data parallelism."""
