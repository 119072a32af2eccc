"""`pathways status` without a cluster: whom it asks, what it prints, and what it says when nobody answers."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from rich.console import Console

from pathways_ray.cli import commands, drill, island, status
from pathways_ray.client import registry
from pathways_ray.client.asking import hint
from pathways_ray.client.registry import Record
from pathways_ray.errors import AuthenticationError, Failure, QuotaExceeded, UsageError
from pathways_ray.transport import messages, streams

HERE = Record("grpc://127.0.0.1:1001", "first", 41)
THERE = Record("grpc://127.0.0.1:1002", "second", 42)

STATUS: dict[str, Any] = {
    "islands": [
        {
            "island": 0,
            "platform": "cpu",
            "hosts": [
                {
                    "host": 0,
                    "node": "0123456789abcdef",
                    "pid": 4711,
                    "up": True,
                    "devices": [
                        {"device": "0.0", "slices": ["session 1: left"]},
                        {"device": "0.1", "slices": ["session 1: left"]},
                        {"device": "0.2", "slices": []},
                        {"device": "0.3", "slices": ["session 2: right"]},
                    ],
                },
                {"host": 1, "node": "fedc", "pid": 4712, "up": False, "devices": []},
            ],
        }
    ],
    "slices": [
        {"session": 1, "slice": 7, "name": "left", "mesh": {"x": 2}, "island": 0, "devices": ["0.0", "0.1"]},
        {"session": 2, "slice": 8, "name": "right", "mesh": {"x": 1, "y": 1}, "island": 0, "devices": ["0.3"]},
    ],
    "sessions": [
        {
            "session": 1,
            "name": "[red]trainer\x1b[2J",
            "buffers": 3,
            "bytes": 1_500_000,
            "programs": 2,
            "in_flight": 5,
            "waiting": 1,
        }
    ],
}


@pytest.mark.parametrize(
    ("url", "token", "running", "expected"),
    [
        ("grpc://head:1", "t", [], ("grpc://head:1", "t")),
        ("grpc://head:1", "t", [HERE, THERE], ("grpc://head:1", "t")),
        (THERE.url, "", [HERE, THERE], (THERE.url, "second")),
        (THERE.url, "other", [HERE, THERE], (THERE.url, "other")),
        ("", "", [HERE], (HERE.url, "first")),
        ("", "other", [HERE], (HERE.url, "other")),
    ],
)
def test_whom_it_asks(url: str, token: str, running: list[Record], expected: tuple[str, str]) -> None:
    assert status.choose(url, token, running) == expected


@pytest.mark.parametrize(
    ("url", "running", "says"),
    [
        ("", [], "no cluster of yours runs on this machine; say which with --url and --token"),
        ("", [HERE, THERE], r"127.0.0.1:1001 \(process 41\), grpc://127.0.0.1:1002 \(process 42\); choose one"),
        ("grpc://head:1", [HERE], "grpc://head:1 is no cluster that you started .* --token"),
    ],
)
def test_whom_it_cannot_choose(url: str, running: list[Record], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        status.choose(url, "", running)


def printed(found: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=140, markup=False, highlight=False)
    status.show(found, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def test_what_it_prints() -> None:
    assert rows(printed({"url": "grpc://head:1", **STATUS})) == [
        ["0", "cpu", "0", "01234567", "4711", "0.0 - 0.1", "session 1: left"],
        ["0", "cpu", "0", "01234567", "4711", "0.2", "nobody"],
        ["0", "cpu", "0", "01234567", "4711", "0.3", "session 2: right"],
        ["7", "left", "x=2", "0", "0.0 0.1", "session 1 [red]trainer?[2J"],
        ["8", "right", "x=1, y=1", "0", "0.3", "session 2"],
        ["1", "[red]trainer?[2J", "2", "3", "1.5 MB", "5", "1"],
    ]


def test_a_host_that_is_down_is_shown_as_down() -> None:
    host = {"host": 3, "node": "n", "pid": 1, "up": False, "devices": [{"device": "3.0", "slices": []}]}
    found = {"islands": [{"island": 1, "platform": "gpu", "hosts": [host]}], "slices": [], "sessions": []}
    assert rows(printed({"url": "u", **found})) == [["1", "gpu", "3", "n", "down", "3.0", "nobody"]]


def test_a_host_of_an_island_that_never_formed_is_shown_as_down() -> None:
    host = {"host": 7, "node": "", "pid": 0, "epoch": 0, "up": False, "devices": []}
    text = printed(STATUS | {"url": "u", "islands": [{"island": 1, "platform": "", "state": "away", "hosts": [host]}]})
    assert ["1 (away)", "", "7", "", "down", "-", "nobody"] in rows(text)


def test_an_island_that_is_not_up_says_its_state() -> None:
    drained = {**STATUS, "islands": [{**STATUS["islands"][0], "state": "draining"}]}
    assert "0 (draining)" in printed({"url": "u", **drained})
    assert "0 (" not in printed({"url": "u", **STATUS})
    last = {**STATUS, "islands": [{**STATUS["islands"][0], "reason": "its node ends"}]}
    assert "(up: its node ends)" in " ".join(printed({"url": "u", **last}).split())


@contextmanager
def answering(answer: Callable[[messages.Status, str], bytes]) -> Iterator[str]:
    """A server in place of a controller; the address of its client service."""

    def call(data: bytes, context: grpc.ServicerContext) -> bytes:
        request = messages.REQUEST.decode(data)
        assert isinstance(request, messages.Status)
        return answer(request, str(dict(context.invocation_metadata())["authorization"]))

    _, service, method = streams.CALL.split("/")
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        handler = grpc.unary_unary_rpc_method_handler(call)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"grpc://127.0.0.1:{port}"
        server.stop(None).wait()


def test_tenants_have_a_table_when_there_are_any() -> None:
    alice = {
        "tenant": "alice",
        "weight": 2.0,
        "priority": 1,
        "launch_limit_s": 90.0,
        "device_seconds": 12.34,
        "share": 0.667,
        "sessions": 1,
    }
    counts = {"queued": 7, "in_flight": 3, "waiting": 2, "device_bytes": 1_500_000}
    text = shown({"url": "grpc://head:1", **STATUS, "tenants": [{**alice, **counts}]})
    (row,) = [line.split() for line in text.splitlines() if "alice" in line]
    assert [word for word in row if word not in "│┃"] == [
        *("alice", "2", "1", "90", "s", "12.3", "67%", "7", "3", "2", "1.5", "MB")
    ]
    assert "tenants" not in shown({"url": "grpc://head:1", **STATUS})


def shown(found: dict[str, Any]) -> str:
    out = io.StringIO()
    status.show(found, Console(file=out, width=120, markup=False))
    return out.getvalue()


def test_it_asks_without_a_session() -> None:
    asked = []

    def answer(request: messages.Status, token: str) -> bytes:
        asked.append((request.session, token))
        return messages.encode(messages.StatusReply(json.dumps(STATUS)))

    with answering(answer) as url:
        assert status.ask(url, "t0ken") == STATUS
    assert asked == [(0, "t0ken")]


@pytest.mark.parametrize(
    ("reply", "error", "says"),
    [
        (messages.Refused(Failure("SessionClosed", "session 0 is not open")), AuthenticationError, "is not that of"),
        (messages.Refused(Failure("QuotaExceeded", "too often")), QuotaExceeded, "too often"),
        (messages.Accepted(), UsageError, "no cluster of this version"),
    ],
)
def test_a_refusal_is_an_error(reply: messages.Reply, error: type[Exception], says: str) -> None:
    with answering(lambda request, token: messages.encode(reply)) as url, pytest.raises(error, match=says):
        status.ask(url, "t")


def test_a_cluster_without_hosts_is_warned_of() -> None:
    assert "warning: no host is up" in printed({"url": "u", **STATUS, "islands": []})
    assert "no host is up" not in printed({"url": "u", **STATUS})


def test_who_does_not_encrypt_is_told_of_it() -> None:
    assert "begins with grpcs://" in hint("grpc://here:1", "Socket closed")
    assert hint("grpcs://here:1", "Socket closed") == hint("grpc://here:1", "no route") == ""


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, so nobody else gets it; not listening, so nobody answers
        with pytest.raises(UsageError, match="no cluster answers at grpc:"):
            status.ask(f"grpc://127.0.0.1:{free.getsockname()[1]}", "t")


def test_somebody_who_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(UsageError, match="no cluster answers at") as found:
            status.ask(f"grpc://127.0.0.1:{silent.getsockname()[1]}", "t", timeout=0.5)
        assert "within 0.5 s. If one runs there, 'pathways status --diagnose' says which" in str(found.value)
        assert time.monotonic() - start < 10.0


@pytest.mark.parametrize("url", ["", "head:1", "http://head:1"])
def test_an_address_of_another_kind(url: str) -> None:
    with pytest.raises(UsageError, match="looks like grpc://host:port"):
        status.ask(url, "t")


def test_a_port_that_none_is_is_not_dialled() -> None:
    """The C library takes its last 16 bits, and who listens there would be shown the token."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"grpc://127.0.0.1:{other.getsockname()[1] + (1 << 16)}"
        other.setblocking(False)
        with pytest.raises(UsageError, match="a port is below 65536"):
            status.ask(url, "t", timeout=0.5)
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize("token", ["tökèn", "two\nlines"])
def test_a_token_that_cannot_be_one(token: str) -> None:
    with pytest.raises(AuthenticationError, match="characters that no token has"):
        status.ask("grpc://127.0.0.1:1", token)


def test_a_cluster_that_is_away_is_meant_by_those_who_ask_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    record = registry.Record("grpc://here:1", "t", name="see")
    monkeypatch.setattr(registry, "running", lambda: ())
    monkeypatch.setattr(registry, "silent", lambda: (record,))
    assert status.cluster_meant(None, None, None, away=True) == ("grpc://here:1", "t", "")
    with pytest.raises(UsageError, match="does not answer"):
        status.cluster_meant(None, None, None)


@pytest.mark.parametrize(
    "command",
    [
        ["island", "drain", "0"],
        ["island", "undrain", "0"],
        ["island", "remove", "0"],
        ["drill", "--kill", "host:0", "--times", "1", "--every", "0"],
    ],
)
def test_a_cluster_that_a_command_takes_from_is_named_unless_the_user_did(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever thinks of one of their own hears in time that another one was found."""
    record = registry.Record("grpc://here:1", "t", name="production")
    monkeypatch.setattr(registry, "running", lambda: [record])
    monkeypatch.setattr(registry, "silent", list)
    acted: list[str] = []

    def act(url: str, *rest: object) -> list[object]:
        acted.append(url)
        return []

    for name in ("drain", "undrain", "remove"):
        monkeypatch.setattr(island, name, act)
    monkeypatch.setattr(drill, "ask", lambda url, token, ca: {})
    monkeypatch.setattr(drill, "_victims", lambda *_: [])
    monkeypatch.setattr(drill, "drill", lambda *_: act(record.url) or "host 0 killed")
    found = CliRunner().invoke(commands, command, env={"PATHWAYS_URL": ""})
    named = CliRunner().invoke(commands, [*command, "--url", record.url])
    assert (found.exit_code, named.exit_code, acted) == (0, 0, [record.url] * 2), found.output
    which = "pathways: acting on the cluster at grpc://here:1 (runtime 'production'), which runs on this machine\n"
    assert (found.stderr, named.stderr) == (which, "")
    assert found.stdout == named.stdout != ""


def test_the_names_of_axes_steer_no_terminal() -> None:
    meshes = [{**one, "mesh": {"x\x1b[2J\n": 2}} for one in STATUS["slices"]]
    text = printed({"url": "u", **STATUS, "slices": meshes})
    assert "x?[2J?=2" in text
    assert "\x1b" not in text
