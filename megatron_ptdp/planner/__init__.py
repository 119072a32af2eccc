"""Finds the fastest parallel configuration of a model on a cluster, and explains it, before a device is rented.

    question = Question(load.model("gpt3-175b"), cluster, load.software(cluster.software), devices=1024, batch=1536)
    found = search(question)

The parts, in the order in which a question goes through them:

    load         models, clusters and software from TOML files
    model        the shape of what is trained, its parameters and FLOPs
    cluster      devices, networks, operations; all constants of the time model
    plan         one parallel configuration, and whether it is legal
    operations   seconds of one operation: a roofline
    network      seconds of one collective or message: levels of rings and trees
    layers       seconds of one layer, the embedding, the logits
    memory       bytes of a device, by class
    pipeline     seconds of all microbatches, closed forms;  simulated: by the event simulator
    estimate     all of it for one plan
    space, search, misses    all plans; the best; why there is none
    reasons      what binds, why others lost, the paper's heuristics
    traffic, goodput         bytes per link; failures and money
    records, report, cli     for machines and for people

Nothing here imports JAX or Ray, but the measuring of `calibrate`. docs/planner.md explains the model.
"""

from megatron_ptdp.config.cluster import Cluster, Device, Level, Operations, Software
from megatron_ptdp.config.model import Model
from megatron_ptdp.errors import BadFigure, Illegal, NothingFits, PlanningError, UnknownName
from megatron_ptdp.planner.estimate import Estimate, Question, TimeSplit, estimate
from megatron_ptdp.planner.memory import Memory, StageMemory, stage_memory
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.search import Found, estimate_exactly, search

__all__ = [
    "BadFigure",
    "Cluster",
    "Device",
    "Estimate",
    "Found",
    "Illegal",
    "Level",
    "Memory",
    "Model",
    "NothingFits",
    "Operations",
    "Plan",
    "PlanningError",
    "Question",
    "Software",
    "StageMemory",
    "TimeSplit",
    "UnknownName",
    "estimate",
    "estimate_exactly",
    "search",
    "stage_memory",
]
