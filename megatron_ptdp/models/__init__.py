"""Transformers as stages of a pipeline: GPT, T5, mixtures of experts; and what a model is to the parts that train it."""
