"""Printed figures of training with other systems: rows like those of `rows`, with the cluster and the software.

Plans are as printed. Where a source leaves out the number of chunks, that is said beside the row; where it leaves out
the plan, there is no row here. One constant of `h100` was set on three rows (`H100_CALIBRATION`), and one of `tpu-v4`
was chosen with PaLM's in sight (`SEEN`); none on the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.paper_tables.rows import GPT_530B, Row, gpt
from megatron_ptdp.config import load
from megatron_ptdp.config.model import Model
from megatron_ptdp.planner.plan import Plan

H100_CALIBRATION = (("Llama 3", "405B on 8192"), ("Nemotron-4", "340B on 6144"), ("MPT, FSDP, H100", "70b on 64, b=8"))
"""The rows on which `matrix_efficiency` of `h100` was set, by least squares."""

SEEN = (("PaLM", "540B on 6144"),)
"""The row that `matrix_efficiency` of `tpu-v4` was chosen with: no prediction either."""

# name, layers, hidden, heads, p, chunks, b, batch, seconds with full recompute, and with sequence parallelism
KORTHIKANTI = (
    ("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
    ("530B", 105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
    ("1T", 128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49),
)

# name, layers, hidden, heads; devices, microbatch, batch, recompute, tokens/s per device on 80 GB A100 or H100
MPT = {"70b": (80, 8192, 64), "30b": (48, 7168, 56), "13b": (40, 5120, 40), "7b": (32, 4096, 32), "3b": (32, 2560, 32)}
MPT_A100 = (
    ("70b", 64, 8, 2048, "full", 410),
    ("70b", 32, 2, 1024, "full", 373),
    ("30b", 8, 3, 504, "full", 916),
    ("13b", 8, 2, 48, "none", 2262),
    ("7b", 8, 6, 96, "none", 4641),
    ("3b", 8, 10, 160, "none", 10811),
)
MPT_H100 = (
    ("70b", 64, 8, 2048, "full", 1039),
    ("70b", 32, 2, 1024, "full", 882),
    ("30b", 32, 14, 1344, "full", 2308),
    ("30b", 8, 3, 504, "full", 2002),
    ("13b", 64, 2, 128, "none", 4800),
    ("13b", 8, 2, 16, "none", 4792),
    ("7b", 8, 6, 48, "none", 10643),
    ("3b", 64, 6, 1152, "none", 22525),
)


def other_rows() -> Iterator[Row]:
    yield from _korthikanti()
    yield from _deepspeed()
    yield from _megatron_core()
    yield from _fully_sharded()
    yield _palm()


def _korthikanti() -> Iterator[Row]:
    """Korthikanti et al. 2022, table 5: seconds of an iteration."""
    for name, layers, hidden, heads, p, v, b, batch, full, present in KORTHIKANTI:
        for printed, recompute in ((full, "full"), (present, "selective")):
            schedule = "interleaved" if v > 1 else "1f1b"
            plan = Plan(p, 8, 1, v, b, batch, schedule, recompute, sequence_parallel=recompute == "selective")
            label = f"{name}, recompute {recompute}"
            model = gpt(name, layers, hidden, heads)
            yield Row("Korthikanti table 5", label, model, plan, printed, "s", software="megatron-2022")


def _deepspeed() -> Iterator[Row]:
    """Smith et al. 2022, section 2.4 (MT-NLG); Le Scao et al. 2022, section 3.2 (BLOOM); Zhang et al. 2022 (OPT)."""
    for devices, seconds in ((2240, 60.1), (2800, 50.2), (3360, 44.4)):
        plan = Plan(35, 8, devices // 280, 1, 1, 1920, scatter_gather=False)
        label = f"530B on {devices}"
        yield Row("MT-NLG", label, GPT_530B, plan, seconds, "s", software="megatron-deepspeed")
    plan = Plan(12, 4, 8, 1, 2, 2048, zero=1, scatter_gather=False)
    yield Row("BLOOM", "176B on 384", load.model("bloom-176b"), plan, 150, cluster="a100-80g-jean-zay")
    plan = Plan(1, 8, 124, 1, 8, 992, zero=3)  # its microbatch is not printed
    yield Row("OPT", "175B on 992", load.model("opt-175b"), plan, 147)


def _megatron_core() -> Iterator[Row]:
    """Grattafiori et al. 2024, table 4 (Llama 3); the technical report of Nemotron-4 340B, table 2; both on H100."""
    present = {"schedule": "interleaved", "recompute": "none", "sequence_parallel": True, "zero": 1}
    for devices, printed in ((8192, 430), (16384, 400)):  # chunks are not printed: a layer each
        plan = Plan(16, 8, devices // 128, 8, 1, 2048, **present)  # type: ignore[arg-type]
        model = load.model("llama3-405b")
        yield Row("Llama 3", f"405B on {devices}", model, plan, printed, "model TFLOP/s", "h100")
    for devices, batch, seconds in ((1536, 768, 10.3), (3072, 1536, 10.4), (6144, 2304, 8.0)):  # a layer per chunk
        plan = Plan(12, 8, devices // 96, 8, 1, batch, **present)  # type: ignore[arg-type]
        yield Row("Nemotron-4", f"340B on {devices}", load.model("nemotron4-340b"), plan, seconds, "s", "h100")


def _fully_sharded() -> Iterator[Row]:
    """MosaicML's llm-foundry, scripts/train/benchmarking/README.md: full sharding, sequences of 2,048."""
    for name, cluster, rows in (("A100", "a100-80g", MPT_A100), ("H100", "h100", MPT_H100)):
        for size, devices, b, batch, recompute, printed in rows:
            layers, hidden, heads = MPT[size]
            model = Model(size, layers, hidden, heads, sequence=2048, vocabulary=50368, bias=False, dropout=False)
            plan = Plan(1, 1, devices, 1, b, batch, recompute=recompute, zero=3)
            label, table = f"{size} on {devices}, b={b}", f"MPT, FSDP, {name}"
            yield Row(table, label, model, plan, printed, "tokens/s", cluster, "megatron-core")


def _palm() -> Row:
    """Chowdhery et al. 2022, table 3: 46.2 % of the peak, its weights cut 12 ways and over the replicas."""
    plan = Plan(1, 12, 512, 1, 4, 2048, recompute="full", sequence_parallel=False, zero=3)
    return Row("PaLM", "540B on 6144", load.model("palm-540b"), plan, 0.462 * 275, "model TFLOP/s", "tpu-v4")
