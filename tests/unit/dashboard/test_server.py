"""The page's server: who gets in, and what browsers get however many, slow or late they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pathways_ray.dashboard import server
from pathways_ray.dashboard.server import Dashboard, serve
from pathways_ray.errors import UsageError
from pathways_ray.observe.why import WHY
from pathways_ray.transport import messages
from tests.unit.observe.snapshots import snapshot

TOKEN = "the-token-of-the-page"
PACE = server.Pace(look_s=0.05, share=1.0, away_s=0.05, ping_s=0.5)
SHOWN = {"Authorization": f"Bearer {TOKEN}"}


async def until(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


class Served:
    """A dashboard over a controller of the test's own."""

    def __init__(self, dashboard: Dashboard, base: str, browser: aiohttp.ClientSession) -> None:
        self.dashboard, self.base, self.browser = dashboard, base, browser

    async def status(self, path: str, **options: Any) -> int:
        async with self.browser.get(self.base + path, allow_redirects=False, **options) as answer:
            await answer.read()
            return answer.status

    async def text(self, path: str) -> str:
        async with self.browser.get(self.base + path, headers=SHOWN) as answer:
            return await answer.text()

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None)
        async with self.browser.get(self.base + "/events", headers=SHOWN, timeout=timeout) as answer:
            assert answer.status == 200
            yield answer

    async def left(self) -> None:
        """Waits until all browsers are gone."""
        await until(lambda: not self.dashboard.browsers)


@contextlib.asynccontextmanager
async def serving(looking: Callable[[], Any], asking: Callable[[Any], str], pace: server.Pace) -> AsyncIterator[Served]:
    dashboard = Dashboard(looking, asking, TOKEN, pace)
    runner = dashboard.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    dashboard.serves_at("127.0.0.1", port)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), connector=connector) as browser:
        yield Served(dashboard, f"http://127.0.0.1:{port}", browser)
    await runner.cleanup()


def run(
    test: Callable[[Served], Awaitable[None]],
    looking: Callable[[], Any] = snapshot,
    asking: Callable[[Any], str] = lambda look: "{}",
    pace: server.Pace = PACE,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), serving(looking, asking, pace) as served:
            await test(served)

    asyncio.run(main())


async def events(stream: aiohttp.ClientResponse, *names: str) -> dict[str, Any]:
    """What comes until there was an event of each of these names."""
    found: dict[str, Any] = {}
    name = ""
    while not set(names) <= set(found):
        line = (await stream.content.readline()).decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found[name] = json.loads(line.removeprefix("data: "))
    return found


# --- who gets in ------------------------------------------------------------------------------------------------------


def test_without_the_token_there_is_nothing() -> None:
    async def test(served: Served) -> None:
        for path in ("/", "/events", "/static/page.js", "/why?launch=1", "/log?process=controller", "/nowhere"):
            assert await served.status(path) == 401
            assert await served.status(path, headers={"Authorization": "Bearer wrong"}) == 401
            assert await served.status(path, headers={"Cookie": f"{server.COOKIE}=wrong"}) == 401
        assert await served.status("/?token=wrong") == 401
        assert await served.status(f"/events?token={TOKEN}") == 401, "a link to elsewhere does not open the page"

    run(test)


def test_the_address_with_the_token_becomes_a_cookie_that_other_sites_cannot_have_sent() -> None:
    async def test(served: Served) -> None:
        async with served.browser.get(f"{served.base}/?token={TOKEN}", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert await served.status("/", headers={"Cookie": cookie.split(";")[0]}) == 200

    run(test)


def test_pages_of_several_clusters_stay_open_in_one_browser() -> None:
    """A browser keeps the cookies of one machine together, whatever their ports."""

    async def test(served: Served) -> None:
        jar = aiohttp.CookieJar(unsafe=True)
        async with serving(snapshot, str, PACE) as other, aiohttp.ClientSession(cookie_jar=jar) as browser:
            for base in (served.base, other.base):
                async with browser.get(f"{base}/?token={TOKEN}") as answer:
                    assert answer.status == 200
            assert len(jar) == 2

    run(test)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({}, 200),
    ],
)
def test_a_browser_from_another_site_is_refused(headers: dict[str, str], status: int) -> None:
    async def test(served: Served) -> None:
        assert await served.status("/", headers={**SHOWN, **headers}) == status

    run(test)


@pytest.mark.parametrize("sent", [b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /\xff" * 9000])
def test_what_is_no_request_is_answered_and_writes_nothing(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Anybody on the machine can send it. What goes wrong in the page itself is written all the same."""

    def broken(_: Any) -> str:
        raise RuntimeError("a fault of the page")

    async def test(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.base.rpartition(":")[2]))
        writer.write(sent)
        assert (await reader.readline()).startswith(b"HTTP/1.0 400")
        writer.close()
        assert not caplog.records
        assert await served.status("/why?launch=1", headers=SHOWN) == 500
        assert "a fault of the page" in caplog.text

    run(test, asking=broken)


def test_pages_load_nothing_from_elsewhere_and_take_no_text_for_markup() -> None:
    async def test(served: Served) -> None:
        async with served.browser.get(served.base + "/", headers=SHOWN) as answer:
            policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        for path in ("/", "/static/page.js", "/static/graph.js", "/static/page.css"):
            text = await served.text(path)
            assert "https://" not in text
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert "innerHTML" not in text
        for path in ("/static/server.py", "/static/..%2fserver.py"):
            assert await served.status(path, headers=SHOWN) == 404

    run(test)


def test_the_page_is_served_on_loopback_only() -> None:
    with pytest.raises(ValueError, match="on loopback only"):
        serve("grpc://here:1", "token", address="0.0.0.0")


# --- what it shows ----------------------------------------------------------------------------------------------------


def test_a_browser_gets_all_sections_and_then_what_changes() -> None:
    state = {"policy": "fifo"}

    async def test(served: Served) -> None:
        async with served.stream() as stream:
            first = await events(stream, "devices", "launches", "programs", "transfers", "events", "totals")
            assert first["launches"]["rows"][0][0] == "640"
            assert first["devices"][0]["hosts"][0]["devices"][0] == ["0.0", ["session 1: left"], "640 step"]
            await events(stream, *(set(served.dashboard.page.texts) - set(first)))
            state["policy"] = "share"
            later = await events(stream, "totals")
            assert later["totals"]["policy"] == "share"
            assert set(later) == {"totals"}, "the others have not changed"

    run(test, lambda: snapshot(**state))


def test_nobody_looks_while_no_page_is_open() -> None:
    looks: list[int] = []

    async def test(served: Served) -> None:
        await served.text("/")
        assert looks == []
        async with served.stream() as stream:
            await events(stream, "totals")
        await served.left()
        assert not served.dashboard.wanted.is_set()
        assert looks

    run(test, lambda: looks.append(1) or snapshot())


def test_many_browsers_share_the_looks_and_one_too_many_is_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(server, "MAX_BROWSERS", 50)

    async def test(served: Served) -> None:
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(served.stream()) for _ in range(50)]
            for stream in streams:
                await events(stream, "totals")
            assert await served.status("/events", headers=SHOWN) == 503
        await served.left()
        async with served.stream() as stream:
            await events(stream, "totals")
        assert len(looks) < 50

    run(test, lambda: looks.append(1) or snapshot())


def test_a_controller_that_is_away_is_told_and_found_again() -> None:
    """The browser's page stays open over it."""
    answers: list[Any] = [snapshot(), UsageError("no cluster answers"), snapshot()]

    def looking() -> Any:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def test(served: Served) -> None:
        async with served.stream() as stream:
            assert (await events(stream, "away"))["away"] == "no cluster answers"
            assert (await events(stream, "away"))["away"] == ""

    run(test, looking)


def test_a_look_that_fails_is_told_and_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    """Be it by an error of this project, such as of what another version of the runtime says, or of a library."""
    answers: list[Any] = [snapshot(), KeyError(), snapshot(islands=[{}]), TypeError("no such type"), snapshot()]

    def looking() -> Any:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def test(served: Served) -> None:
        async with served.stream() as stream:
            told = [(await events(stream, "away"))["away"] for _ in range(4)]
            assert told == ["KeyError", "'hosts'", "no such type", ""]

    run(test, looking, pace=PACE._replace(look_s=0.2, away_s=0.2))
    logged = [record.exc_info[0] for record in caplog.records if record.name == server.__name__ and record.exc_info]
    assert logged == [KeyError, KeyError, TypeError]


def test_a_browser_that_does_not_read_is_let_go() -> None:
    """It opens the stream and reads nothing; what it is sent fills every buffer on the way."""
    count = [0]

    def big() -> Any:
        count[0] += 1
        return snapshot(policy=f"{count[0]} " + "x" * (2 << 20))

    async def test(served: Served) -> None:
        host, port = served.base.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(f"GET /events HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        await until(lambda: served.dashboard.browsers)
        assert served.dashboard.browsers == 1
        await served.left()
        assert served.dashboard.browsers == 0
        assert not writer.is_closing(), "it was the server that hung up"
        writer.close()

    run(test, big, pace=server.Pace(look_s=0.01, share=0.0, write_limit_s=0.2))


# --- questions and logs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", ["", "x", "-1", "1e3", "%C2%B2", "9" * 30, "7.", ".7", "1.2.3", "7.%C2%B2"])
def test_a_question_about_no_launch_is_refused(launch: str) -> None:
    async def test(served: Served) -> None:
        assert await served.status(f"/why?launch={launch}", headers=SHOWN) == 400

    run(test)


def test_a_question_is_the_controllers_to_answer() -> None:
    def asking(look: Any) -> str:
        if look.number == 7:
            raise UsageError("no cluster answers")
        assert (look.number, look.of) in ((640, 0), (12, 3))
        return '{"subject": "launch 640", "links": [{"text": "runs"}]}'

    async def test(served: Served) -> None:
        assert WHY.decode(await served.text("/why?launch=640")).links[0].text == "runs"
        assert await served.status("/why?launch=3.12", headers=SHOWN) == 200
        assert await served.status("/why?launch=7", headers=SHOWN) == 502

    run(test, asking=asking)


def test_logs_are_those_of_the_processes_that_the_status_names() -> None:
    """They are the controller's to read, wherever they lie; a browser gets the last lines."""
    logs = [{"process": "controller", "node": "a1", "path": ""}, {"process": "host 1", "node": "b2", "path": ""}]
    asked: list[Any] = []

    def asking(question: Any) -> str:
        asked.append(question)
        if question.process == "host 1":
            raise UsageError("its machine does not answer")
        return "".join(f"line {n}\u2028\n" for n in range(500))  # what a name may have, and no end of a line

    async def test(served: Served) -> None:
        async with served.stream() as stream:
            await events(stream, "logs")
        text = await served.text("/log?process=controller")
        assert text.splitlines()[0] == f"line {500 - server.LOG_LINES}"
        assert await served.status("/log?process=host%201", headers=SHOWN) == 502
        assert asked == [messages.ReadLog(0, "controller", "a1"), messages.ReadLog(0, "host 1", "b2")]
        for process in ("bad", "../secret", ""):
            assert await served.status(f"/log?process={process}", headers=SHOWN) == 404
        assert len(asked) == 2

    run(test, lambda: snapshot(logs=logs), asking)
