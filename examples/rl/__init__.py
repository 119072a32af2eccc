"""Reinforcement learning over two islands: a small transformer learns to sort digits by GRPO.

`task` has the prompts and the reward, in NumPy; `model` the transformer; `grpo` what samples and what learns, as
functions of JAX; `loops` runs them on slices, in three modes, and in one process of plain JAX. `python -m examples.rl`.
"""
