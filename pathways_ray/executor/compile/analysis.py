"""Answers to questions about a compiled computation, by XLA (`observe.computations`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pathways_ray.observe.computations import Computation

MEMORY = (
    "generated_code_size_in_bytes",
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
)

MAX_TEXT = 8 << 20
"""Characters of a computation's code that are told."""

MAX_REPORT_TEXT = 32 << 20
"""Characters of code in a report on all computations of a program. JSON makes at most six bytes of one, so that it fits
into one message (`limits.MAX_MESSAGE_BYTES`)."""


def analysis(
    compiled: Any,
    number: int,
    name: str,
    runs: int,
    text: bool,
    cost: Mapping[str, float] | None = None,
    room: int = MAX_TEXT,
) -> Computation:
    """XLA's figures and code of a computation. It may say nothing, which is no error.

    Args:
        cost: what it said of the computation before the runtime added to it; None asks it now.
        room: characters of code that may be told; never more than `MAX_TEXT` are.
    """
    said = cost if cost is not None else _said(compiled, "cost_analysis") or {}
    memory = _said(compiled, "memory_analysis")
    sizes = {name: int(size) for name in MEMORY if (size := getattr(memory, name, None)) is not None}
    code = str(_said(compiled, "as_text") or "") if text else ""
    if len(code) > (most := min(room, MAX_TEXT)):
        code = f"{code[:most]}\n… cut: {len(code)} characters in all"
    numbers = {str(key): float(value) for key, value in said.items() if isinstance(value, int | float)}
    return Computation(number, name, runs, numbers, sizes, code)


def _said(compiled: Any, question: str) -> Any:
    ask: Callable[[], Any] | None = getattr(compiled, question, None)
    try:
        return ask() if ask is not None else None
    except Exception:  # of a platform's compiler, which need not know an answer
        return None
