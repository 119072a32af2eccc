"""Finds the fastest parallel configuration of a model on a cluster, and explains it, before a device is rented.

    question = Question(load.model("gpt3-175b"), cluster, load.software(cluster.software), devices=1024, batch=1536)
    found = search(question)

The parts, in the order in which a question goes through them:

    ../config    models, clusters and software, read from TOML files; sizes and layer split of a parallel configuration
    plan         one parallel configuration, and the rules that make it legal;  settings: its values by name
    operations   seconds of one operation: a roofline
    network      seconds of one collective or message: levels of rings and trees
    layers       seconds of one layer, the embedding, the logits
    pipeline     seconds of all microbatches, closed forms;  simulated: by the event simulator
    memory       bytes of a device, by class
    estimate     all of it for one plan
    space        all plans;  search: the best of them
    traffic, goodput         bytes per link; failures and money
    explain/     reasons, plain data and tables of what was found
    calibration/ cluster files from measurements
    questions, cli           the command line

Only `calibration/` loads JAX and Ray, when it measures. docs/planner.md explains the model.
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
