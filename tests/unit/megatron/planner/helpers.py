"""Small models and clusters for the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_ptdp.config import load
from megatron_ptdp.config.cluster import Cluster
from megatron_ptdp.config.model import Model
from megatron_ptdp.planner.estimate import Question


def gpt(layers: int = 8, hidden: int = 1024, heads: int = 16, **more: Any) -> Model:
    return Model(
        **{
            "name": "small",
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "sequence": 512,
            "vocabulary": 1024,
            **more,
        }
    )


def selene(**device: Any) -> Cluster:
    """The A100 cluster, with some figures of its device replaced."""
    cluster = load.cluster("a100-80g")
    return replace(cluster, device=replace(cluster.device, **device))


def faster_network(cluster: Cluster, position: int, factor: float) -> Cluster:
    """One level's bandwidth times a factor."""
    levels = list(cluster.levels)
    levels[position] = replace(levels[position], bandwidth=levels[position].bandwidth * factor)
    return replace(cluster, levels=tuple(levels))


def asked(model: Model, devices: int, batch: int, cluster: Cluster | None = None, software: str = "ptdp") -> Question:
    return Question(model, cluster or selene(), load.software(software), devices, batch)
