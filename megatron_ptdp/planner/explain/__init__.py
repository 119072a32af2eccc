"""Presents what the planner found.

infeasible   the setting that rules out all plans, or the bytes that the least one lacks
reasons      what binds a plan, why others lost, the PTD-P paper's heuristics
records      plain data for `--json`
report       tables for people
"""
