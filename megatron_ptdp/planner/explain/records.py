"""Estimates as plain data, for `--json`."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from megatron_ptdp.planner.estimate import Estimate, Question
from megatron_ptdp.planner.goodput import goodput
from megatron_ptdp.planner.memory import Memory
from megatron_ptdp.planner.traffic import traffic


def question_record(question: Question) -> dict[str, Any]:
    return {
        "model": question.model.name,
        "parameters": question.model.parameters,
        "cluster": question.cluster.name,
        "software": question.software.name,
        "devices": question.devices,
        "batch": question.batch,
        "tokens": question.tokens,
    }


def estimate_record(question: Question, one: Estimate) -> dict[str, Any]:
    """All figures of a plan; bytes, seconds, FLOP/s, hours in SI units, days and prices by their names."""
    return {
        "plan": one.plan.as_dict(),
        "fits": one.fits,
        "memory_limit_bytes": one.limit,
        "memory_bytes": {
            "first": memory_record(one.memory.first),
            "middle": memory_record(one.memory.middle),
            "last": memory_record(one.memory.last),
        },
        "seconds": {**asdict(one.time), "total": one.seconds},
        "simulated": one.simulated,
        "closed_form_seconds": one.closed_form,
        "flops_per_device": {"hardware": one.hardware_flops, "model": one.model_flops, "peak": one.peak_flops},
        "tokens_per_second": one.tokens_per_second,
        "days": one.days,
        "energy_kwh": one.energy,
        "price": one.price,
        "traffic_bytes_per_device": [{**asdict(level), "total": level.total} for level in traffic(question, one)],
        "failures": {
            name: value if isfinite(value) else None for name, value in asdict(goodput(question, one)).items()
        },
    }


def memory_record(memory: Memory) -> dict[str, float]:
    return {**asdict(memory), "total": memory.total}
