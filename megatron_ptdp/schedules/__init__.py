"""Pipeline schedules as plain data: written, checked, lowered, simulated and drawn without running.

`build` makes one by name, `check` says whether it can run, `lower` derives its messages, `simulate` says when
everything happens for given costs, `chrome_trace` and `draw.draw` show that. Nothing here knows JAX or Ray.
docs/schedules.md has what each schedule is for, and how to write one.
"""

from megatron_ptdp.schedules.actions import (
    Action,
    Entry,
    Kind,
    Overlap,
    Schedule,
    ScheduleError,
    Updates,
    loop,
    parse,
    vee,
)
from megatron_ptdp.schedules.check import check, in_flight, peak_memory
from megatron_ptdp.schedules.classic import gpipe, interleaved, looped_bfs, one_f_one_b
from megatron_ptdp.schedules.costs import Costs, Link
from megatron_ptdp.schedules.dualpipe import dualpipe_v
from megatron_ptdp.schedules.lower import Instruction, Lowered, Receive, Reduce, Send, Tie, lower
from megatron_ptdp.schedules.registry import Generator, build, register, rules_of, schedule_names, states_rules
from megatron_ptdp.schedules.rules import Rules
from megatron_ptdp.schedules.simulate import simulate
from megatron_ptdp.schedules.stale import kept_versions, pipedream, pipedream_2bw, versions
from megatron_ptdp.schedules.timeline import Bubble, Event, Span, Timeline, Transfer
from megatron_ptdp.schedules.token_slices import check_slices, terapipe
from megatron_ptdp.schedules.trace import chrome_trace
from megatron_ptdp.schedules.zero_bubble import interleaved_zb, zb_h1, zb_v

__all__ = [
    "Action",
    "Bubble",
    "Costs",
    "Entry",
    "Event",
    "Generator",
    "Instruction",
    "Kind",
    "Link",
    "Lowered",
    "Overlap",
    "Receive",
    "Reduce",
    "Rules",
    "Schedule",
    "ScheduleError",
    "Send",
    "Span",
    "Tie",
    "Timeline",
    "Transfer",
    "Updates",
    "build",
    "check",
    "check_slices",
    "chrome_trace",
    "dualpipe_v",
    "gpipe",
    "in_flight",
    "interleaved",
    "interleaved_zb",
    "kept_versions",
    "loop",
    "looped_bfs",
    "lower",
    "one_f_one_b",
    "parse",
    "peak_memory",
    "pipedream",
    "pipedream_2bw",
    "register",
    "rules_of",
    "schedule_names",
    "simulate",
    "states_rules",
    "terapipe",
    "vee",
    "versions",
    "zb_h1",
    "zb_v",
]
