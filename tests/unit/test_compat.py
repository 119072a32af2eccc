"""What the project has of JAX beside its public names, where JAX is another one than expected."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.buffer_callback as experimental
import jax.numpy as jnp
import pytest

from pathways_ray.compat import within_callback


def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, experimental.__name__, None)


def of_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experimental, "buffer_callback", lambda: None)


def not_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Callable[[], jax.Array]:
        def begin() -> jax.Array:
            raise NotImplementedError("no rule for buffer_callback")

        return begin

    monkeypatch.setattr(experimental, "buffer_callback", refused)


def without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experimental, "buffer_callback", lambda *_: lambda: jnp.zeros((), bool))


def there(_: pytest.MonkeyPatch) -> None:
    pass


UNUSABLE = [missing, of_other_arguments, not_to_be_compiled, without_effect]


@pytest.mark.parametrize("callback", [there, *UNUSABLE])
def test_a_function_runs_once_whatever_becomes_of_the_callback(
    callback: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    callback(monkeypatch)
    ran: list[str] = []
    within_callback(lambda: ran.append("once"))
    assert ran == ["once"]
    assert ("JAX makes no callback" in capsys.readouterr().out) is (callback is not there)


@pytest.mark.parametrize("callback", [there, *UNUSABLE])
def test_what_a_function_raises_is_raised_and_it_does_not_run_again(
    callback: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    callback(monkeypatch)
    error, ran = SystemExit("the function ends"), list[str]()

    def run() -> None:
        ran.append("once")
        raise error

    with pytest.raises(SystemExit) as caught:
        within_callback(run)
    assert caught.value is error
    assert ran == ["once"]


def test_a_failure_of_jax_behind_a_function_is_raised_and_that_does_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails_behind(call: Callable[..., None], _: Any) -> Callable[[], jax.Array]:
        def begin() -> jax.Array:
            call(None, None)
            raise NotImplementedError("behind it")

        return begin

    monkeypatch.setattr(experimental, "buffer_callback", fails_behind)
    ran: list[str] = []
    with pytest.raises(NotImplementedError, match="behind it"):
        within_callback(lambda: ran.append("once"))
    assert ran == ["once"]
