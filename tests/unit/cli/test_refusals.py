"""`pathways refusals`: what it asks of the controller, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from pathways_ray.cli import commands
from pathways_ray.client import registry
from pathways_ray.errors import Failure
from pathways_ray.transport import messages, streams

REFUSALS = [{"id": "0123abc", "tenant": "bob", "program": "dead\x1bly", "reason": "it ended a host", "age_s": 61.5}]


class Controller:
    """A server in place of the controller, which lifts the refusal "0123abc" for who has the token "t0ken"."""

    def __init__(self) -> None:
        self.refusals = list(REFUSALS)
        self.url = ""

    def call(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        assert dict(context.invocation_metadata())["authorization"] == "t0ken"
        reply: Any = messages.StatusReply(json.dumps({"refusals": self.refusals}))
        match messages.REQUEST.decode(data):
            case messages.LiftRefusal(0, "0123abc"):
                self.refusals.clear()
                reply = messages.Accepted()
            case messages.LiftRefusal(0, other):
                reply = messages.Refused(Failure("UsageError", f"no program is refused under {other!r}"))
        return messages.encode(reply)


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    _, service, method = streams.CALL.split("/")
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        handler = grpc.unary_unary_rpc_method_handler(made.call)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        made.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield made
        server.stop(None).wait()


def run(controller: Controller, *arguments: str) -> Any:
    return CliRunner().invoke(commands, ["refusals", "--url", controller.url, "--token", "t0ken", *arguments])


def test_it_lists_the_programs_that_are_refused(controller: Controller) -> None:
    found = run(controller, "--json")
    assert found.exit_code == 0
    assert json.loads(found.output) == REFUSALS
    table = run(controller).output
    assert "0123abc" in table
    assert "dead?ly" in table, "names are what clients chose, and do not steer the terminal"


def test_it_lifts_one_by_its_id(controller: Controller) -> None:
    lifted = run(controller, "--lift", "0123abc")
    assert (lifted.exit_code, lifted.output) == (0, "no program is refused\n")
    assert json.loads(run(controller, "--json").output) == []


def test_an_id_that_nothing_is_refused_under(controller: Controller) -> None:
    told = run(controller, "--lift", "another")
    assert told.exit_code == 2
    assert "no program is refused under 'another'" in told.output
    assert controller.refusals == REFUSALS


@pytest.mark.parametrize(("arguments", "named"), [(["--lift", "0123abc"], True), ([], False)])
def test_a_cluster_that_was_found_is_named_before_it_is_changed(
    arguments: list[str], named: bool, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = registry.Record(controller.url, "t0ken", name="production")
    monkeypatch.setattr(registry, "running", lambda: [record])
    monkeypatch.setattr(registry, "silent", list)
    found = CliRunner().invoke(commands, ["refusals", *arguments], env={"PATHWAYS_URL": ""})
    assert found.exit_code == 0, found.output
    assert (f"acting on the cluster at {controller.url} (runtime 'production')" in found.stderr) == named
