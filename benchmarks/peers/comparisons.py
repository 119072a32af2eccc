"""The pairs that are compared, and their ratios. Above 1, the first is faster.

Both run the same payload where both have it; otherwise (TensorFlow brings its own all-reduce) the ratio says so.
"""

from typing import Any

from benchmarks import measure
from benchmarks.peers.rounds import Case, Session

JAX = "jax-multicontroller"
PAIRS = (
    (("pathways-no-fusion", "opbyop"), (JAX, "opbyop")),
    (("pathways", "opbyop"), (JAX, "opbyop")),
    (("pathways", "opbyop-wait"), (JAX, "opbyop-wait")),
    (("pathways", "chained"), (JAX, "opbyop")),
    (("pathways", "chained"), (JAX, "fused")),
    (("pathways", "fused"), (JAX, "fused")),
    (("pathways", "opbyop"), ("ray-actors", "opbyop-wait")),
    (("pathways", "opbyop"), ("ray-actors", "opbyop")),
    (("pathways", "opbyop"), ("ray-actors", "kept-opbyop")),
    (("pathways", "chained"), ("ray-actors", "chained")),
    (("pathways", "chained"), ("ray-actors", "list")),
    (("pathways", "fused"), ("ray-actors", "fused")),
    (("pathways", "opbyop"), ("ray-compiled-graphs", "opbyop")),
    (("pathways", "chained"), ("ray-compiled-graphs", "chained")),
    (("pathways", "opbyop"), ("tf1-sessions", "opbyop-wait")),
    (("pathways", "chained"), ("tf1-sessions", "chained")),
    (("pathways", "opbyop"), ("monarch-actors", "opbyop-wait")),
    (("pathways", "opbyop"), ("monarch-actors", "opbyop")),
    (("pathways", "chained"), ("monarch-actors", "chained")),
    (("pathways", "chained"), ("monarch-actors", "list")),
)


def ratios(made: Session) -> list[dict[str, Any]]:
    """Rates of the first over rates of the second, round by round, for every payload that both have."""
    found = []
    for over, under in PAIRS:
        for payload in ("allreduce", "noop"):
            fast, slow = Case(*over, payload), Case(*under, payload)
            # A sample is a time, and the ratio is one of rates: so the other way round.
            times, against = made.samples.get(fast), made.samples.get(slow)
            if times and against:
                is_payload = [made.systems[case.system].described["payloads"][payload] for case in (fast, slow)]
                found.append(
                    {
                        "name": f"{over[0]} {over[1]} / {under[0]} {under[1]}",
                        "payload": payload,
                        "same_payload": is_payload[0] == is_payload[1],
                        "numerator": vars(fast),
                        "denominator": vars(slow),
                        "hosts": made.hosts,
                        "devices_per_host": made.devices,
                        **measure.paired_ratios(against, times),
                    }
                )
    return found
