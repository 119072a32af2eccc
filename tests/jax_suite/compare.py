"""What the outcomes of JAX's tests say: how many pass, and the reasons of those that pass on plain CPU alone. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.jax_suite.worker import PASSED

CLIENT, OURS, LOCAL = "client", "proxy", "plain"


@dataclass(frozen=True)
class Reason:
    """Why a test does not pass. `whose` is `client` for jaxlib's, `plain` for tests that ask for local devices."""

    whose: str
    text: str


KNOWN = (
    (r"Only local arrays are supported", Reason(CLIENT, "NumPy's buffer protocol: only of arrays in the process")),
    (r"CopyArrays only supports devices", Reason(CLIENT, "arrays from several devices to several of the backend cpu")),
    (r"Negative or zero strides", Reason(CLIENT, "NumPy arrays with negative strides")),
    (r"owned by a non-PjRt-compatible client", Reason(CLIENT, "arrays of the backend cpu to a sharding over others")),
    (
        r"PjRt-compatible|dlpack|DLPack|unsafe_buffer_pointer|unsafe_raw_buffer",
        Reason(CLIENT, "dlpack, addresses of memory, costs before compilation: only of backends in the process"),
    ),
    (r"Unsupported host callback|host callback", Reason(CLIENT, "host callbacks (pure_callback, io_callback, debug)")),
    (r"custom_partition", Reason(CLIENT, "custom partitioning: its rules are functions in the client's process")),
    (
        r"reduce-scatter, which gives wrong sums",
        Reason(OURS, "reduce-scatter that XLA makes, between CPU hosts: gloo's sums are wrong"),
    ),
    (r"layout override|Tuples differ: .\d, \d", Reason(OURS, "custom layouts")),
    (
        r"skipped: .*(requires \d+ devices|equires .* devices)",
        Reason(LOCAL, "asks for more devices than the proxy has"),
    ),
    (
        r"failed to find a local CPU device|Unknown backend cpu|Unknown backend: 'cpu'",
        Reason(LOCAL, "asks for a backend of the name cpu beside the proxy's"),
    ),
)
"""Patterns of messages, of which the first that is found tells the reason."""


_DONATION = Reason(CLIENT, "donation: the client does not know that a copy and its array are one")
KNOWN_TESTS = {
    "JaxArrayTest.test_fully_replicated_donated_array_is_deleted": _DONATION,
    "ArrayPjitTest.test_device_put_donate_pytree": _DONATION,
}
"""Tests whose messages say nothing."""


def reason_of(test: str, outcome: str) -> Reason:
    """The reason of an outcome that is not a pass; what is not known is taken for ours."""
    if test in KNOWN_TESTS:
        return KNOWN_TESTS[test]
    for pattern, reason in KNOWN:
        if re.search(pattern, outcome):
            return reason
    return Reason(OURS, _shortened(outcome))


def _shortened(outcome: str) -> str:
    """The first line without what differs from test to test, so that equal ones count together."""
    line = next((line for line in outcome.splitlines() if line.strip()), outcome)
    shorter = re.sub(r"0x[0-9a-f]+|\d+", "N", line)
    return re.sub(r"\[[^]]*\]|\([^)]*\)", "…", shorter)[:140].replace("|", "/").replace("`", "'")


def compared(file: Mapping[str, Any]) -> dict[str, str]:
    """Of a file's tests the outcome of each through the proxy, but for those that do not pass on plain CPU either. One
    that passes through the proxy need not be run there."""
    plain = file["plain"]
    return {test: said for test, said in file["proxy"].items() if PASSED in (said, plain.get(test))}


_UNKNOWN = Reason("not known yet", "does not pass through the proxy; plain CPU has not run it")


def unknown(file: Mapping[str, Any]) -> list[str]:
    """A file's tests that do not pass through the proxy and that plain CPU has not run: there was no time."""
    return [test for test, said in file["proxy"].items() if said != PASSED and test not in file["plain"]]


def table(result: Mapping[str, Any]) -> str:
    """Markdown: passes by file, reasons of what does not pass, and every such test."""
    lines = ["| file | tests | run | pass on plain CPU or here | through the proxy | |", "|---|---|---|---|---|---|"]
    reasons: Counter[Reason] = Counter()
    failed: list[tuple[str, str, Reason]] = []
    total = [0, 0]
    for name, file in result["files"].items():
        found = compared(file)
        passed = sum(outcome == PASSED for outcome in found.values())
        total = [total[0] + len(found), total[1] + passed]
        share = f"{passed / len(found):.1%}" if found else ""
        lines.append(f"| `{name}` | {file['tests']} | {len(file['proxy'])} | {len(found)} | {passed} | {share} |")
        for test, outcome in found.items():
            if outcome != PASSED:
                reason = reason_of(test, outcome)
                reasons[reason] += 1
                failed.append((name, test, reason))
        reasons.update([_UNKNOWN] * len(unknown(file)))
        failed += [(name, test, _UNKNOWN) for test in unknown(file)]
    share = f"{total[1] / total[0]:.1%}" if total[0] else ""
    lines += [f"| all | | | {total[0]} | {total[1]} | {share} |", "", "| whose | reason | tests |", "|---|---|---|"]
    lines += [f"| {reason.whose} | {reason.text} | {count} |" for reason, count in reasons.most_common()]
    lines += ["", "| file | test | whose | reason |", "|---|---|---|---|"]
    lines += [f"| {name} | `{test}` | {reason.whose} | {reason.text} |" for name, test, reason in failed]
    return "\n".join(lines) + "\n"
