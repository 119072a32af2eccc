"""What the outcomes of JAX's tests say."""

from __future__ import annotations

from tests.jax_suite.compare import compared, table


def test_what_plain_cpu_has_not_run_is_not_known_yet() -> None:
    file = {"tests": 4, "proxy": {"a": "passed", "b": "wrong", "c": "wrong", "d": "wrong"}}
    file |= {"plain": {"b": "passed", "d": "wrong"}}
    assert compared(file) == {"a": "passed", "b": "wrong"}
    lines = table({"files": {"array_test": file}}).splitlines()
    text = "not known yet | does not pass through the proxy; plain CPU has not run it |"
    assert f"| {text} 1 |" in lines
    assert f"| array_test | `c` | {text}" in lines
    assert not any("`d`" in line for line in lines)
