"""Logs of processes, read by themselves, or by their machines where they do not answer."""

from __future__ import annotations

import asyncio

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pathways_ray import names, process_log
from pathways_ray.transport.messages import ReadLog

READ_LOG_LIMIT_S = 2.0
"""A process, and then its machine, has this long to read a log; a command waits for 5 s."""


async def read_log(runtime: str, request: ReadLog) -> process_log.Part:
    """A part of the log of a process of a runtime.

    Raises:
        ValueError: no process has this name.
        TimeoutError, ray.exceptions.RayError: neither the process nor its machine answers.
    """
    part = (request.offset, request.file)
    actor = ray.get_actor(names.process(runtime, request.process), names.NAMESPACE)
    try:
        found: process_log.Part = await asyncio.wait_for(actor.read_log.remote(*part), READ_LOG_LIMIT_S)
    except (TimeoutError, ray.exceptions.RayError):
        if not request.node:
            raise
        there = NodeAffinitySchedulingStrategy(request.node, soft=False)
        read = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(process_log.read)
        found = await asyncio.wait_for(read.remote(runtime, request.process, *part), READ_LOG_LIMIT_S)
    return found
