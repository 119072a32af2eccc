"""The page's server: static files and server-sent events, on loopback, for browsers that have its token.

It looks at the controller once a second while a browser is there, and not otherwise. What it knows it tells all: a slow
browser gets the newest state when it has read the one before, and nothing is kept for it. A controller that is away is
told to the browsers, and looked for again.

Who gets in: a request has to name this server as its host (so that no other site can have its name lead here), come
from the page itself where it says where it comes from, and show the token, once in the address that is printed and
then in a cookie that other sites cannot have sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http import HttpProcessingError

from pathways_ray.client.asking import call, look
from pathways_ray.dashboard.sections import Page, sections
from pathways_ray.errors import PathwaysError
from pathways_ray.transport import messages
from pathways_ray.transport.endpoints import is_loopback

MAX_BROWSERS = 64
"""Pages that are open at once; a further one is told to wait."""

LOG_LINES = 200

COOKIE = "pathways_page"
"""The name of a page's cookie before its port: browsers send the cookies of all ports of a machine to each."""

LAUNCH = re.compile(r"(?:(\d{1,17})\.)?(\d{1,17})", re.ASCII)

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

STATIC = {"page.js": "text/javascript", "graph.js": "text/javascript", "page.css": "text/css"}


class Pace(NamedTuple):
    """The times of a page, in seconds.

    Args:
        look_s: between two looks at the controller.
        share: after a look that took long, this many times as long is waited: the page is a guest of the controller.
        away_s: between two looks for a controller that is away.
        write_limit_s: a browser that does not read for this long is let go; it comes again by itself.
        ping_s: a page on which nothing changes gets a sign of life this often, so that both ends notice a dead
            connection.
    """

    look_s: float = 1.0
    share: float = 20.0
    away_s: float = 2.0
    write_limit_s: float = 20.0
    ping_s: float = 15.0


class Dashboard:
    """The server of one cluster's page.

    Args:
        looking: gives everything, as `client.asking.look` does; called in a thread.
        asking: answers a `Look` about one thing, or a `ReadLog`, in a thread.
        token: opens the page.
    """

    def __init__(
        self,
        looking: Callable[[], dict[str, Any]],
        asking: Callable[[messages.Look | messages.ReadLog], str],
        token: str,
        pace: Pace = Pace(),  # noqa: B008 (a tuple)
    ) -> None:
        self.looking = looking
        self.asking = asking
        self.token = token
        self.pace = pace
        self.page = Page()
        self.away = ""
        self.logs: dict[str, str] = {}
        self.browsers = 0
        self.news = asyncio.Event()  # a new one for each change
        self.wanted = asyncio.Event()
        self.hosts: set[str] = set()
        self.cookie = COOKIE

    def app(self) -> web.Application:
        """The application, with its task that looks."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 12)
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/events", self._events)
        app.router.add_get("/why", self._why)
        app.router.add_get("/log", self._log)
        app.cleanup_ctx.append(self._looks)
        return app

    def runner(self) -> web.AppRunner:
        """The application as it is served: a browser that goes is noticed at once, not when it is next written to."""
        log = logging.getLogger(__name__)
        log.addFilter(_is_of_the_page)
        return web.AppRunner(self.app(), access_log=None, logger=log, shutdown_timeout=1.0, handler_cancellation=True)

    def serves_at(self, address: str, port: int) -> None:
        """Names under which requests may come, and the cookie with which they do."""
        names = {address, "localhost", "127.0.0.1", "[::1]"}
        self.hosts = {f"{name}:{port}" for name in names}
        self.cookie = f"{COOKIE}_{port}"

    # --- who gets in --------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.host not in self.hosts:
            return web.Response(status=421, text="this page is not served under that name\n", headers=HEADERS)
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "none")
        if (origin is not None and origin != f"http://{request.host}") or site not in ("same-origin", "none"):
            return web.Response(status=403, text="a request from another site\n", headers=HEADERS)
        if shown := request.query.get("token"):
            if request.path != "/" or not _same(shown, self.token):
                return self._unknown()
            answer = web.Response(status=303, headers={"Location": "/", **HEADERS})
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="Strict", path="/")
            return answer
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not (_same(request.cookies.get(self.cookie, ""), self.token) or _same(bearer, self.token)):
            return self._unknown()
        response: web.StreamResponse = await handler(request)
        return response

    def _unknown(self) -> web.Response:
        text = "open the address that was printed when the page was started: it has the token\n"
        return web.Response(status=401, text=text, headers=HEADERS)

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _looks(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._look_on())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.wanted.wait()
            began = loop.time()
            try:
                found = await asyncio.to_thread(self.looking)
                self.logs = {one["process"]: one["node"] for one in (found.get("status") or {}).get("logs", [])}
                changed = self.page.update(sections(found)) or bool(self.away)
            except Exception as error:  # whatever it is: pages would never hear of the cluster again
                pause = self.pace.away_s
                text = str(error) or type(error).__name__
                changed, self.away = self.away != text, text
                if changed and not isinstance(error, PathwaysError):
                    logging.getLogger(__name__).exception("a look at the cluster has failed")
            else:
                self.away = ""
                took, every = loop.time() - began, self.pace.look_s
                pause = max(every - took, self.pace.share * took - every)
            if changed:
                news, self.news = self.news, asyncio.Event()
                news.set()
            await asyncio.sleep(min(pause, 30.0))

    # --- pages --------------------------------------------------------------------------------------------------------

    async def _index(self, request: web.Request) -> web.Response:
        return _file("index.html", "text/html")

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in STATIC:
            return web.Response(status=404, text="there is no such file\n", headers=HEADERS)
        return _file(name, STATIC[name])

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.browsers >= MAX_BROWSERS:
            text = f"{MAX_BROWSERS} pages are open, the most that are served; close one\n"
            return web.Response(status=503, text=text, headers={"Retry-After": "30", **HEADERS})
        self.browsers += 1
        self.wanted.set()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
        try:
            await response.prepare(request)
            await self._tell(response)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self.browsers -= 1
            if not self.browsers:
                self.wanted.clear()
        return response

    async def _tell(self, response: web.StreamResponse) -> None:
        """Tells one browser what changes, until it is gone. What it has not read is not told twice."""
        seen, away = 0, ""
        await response.write(b"retry: 2000\n\n")
        while True:
            changes, news = self.page.changes, self.news
            text = self.page.since(seen) if changes > seen else ""
            if self.away != away:
                away = self.away
                text += f"event: away\ndata: {json.dumps(away)}\n\n"
            async with asyncio.timeout(self.pace.write_limit_s):
                await response.write((text or ": still here\n\n").encode())
            seen = changes
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.pace.ping_s):
                    await news.wait()

    async def _why(self, request: web.Request) -> web.Response:
        launch = LAUNCH.fullmatch(request.query.get("launch", ""))
        if launch is None:
            text = "give launch=640, or launch=7.12 for launch 12 of session 7\n"
            return web.Response(status=400, text=text, headers=HEADERS)
        look = messages.Look(0, "launch", int(launch[2]), int(launch[1] or 0))
        try:
            text = await asyncio.to_thread(self.asking, look)
        except PathwaysError as error:
            return web.Response(status=502, text=f"{error}\n", headers=HEADERS)
        return web.Response(text=text, content_type="application/json", headers=HEADERS)

    async def _log(self, request: web.Request) -> web.Response:
        """The end of the log of a process, wherever it lies."""
        process = request.query.get("process", "")
        if process not in self.logs:
            return web.Response(status=404, text="there is no such log\n", headers=HEADERS)
        try:
            text = await asyncio.to_thread(self.asking, messages.ReadLog(0, process, self.logs[process]))
        except PathwaysError as error:
            return web.Response(status=502, text=f"{error}\n", headers=HEADERS)
        lines = text.split("\n")  # nothing else ends one: names have what `splitlines` breaks at
        return web.Response(text="\n".join(lines[-LOG_LINES - 1 :]), headers=HEADERS)


def _is_of_the_page(record: logging.LogRecord) -> bool:
    """Whether an error is the page's own. Anybody on the machine can send what is no request, which is answered."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "surrogatepass"), token.encode())


def _file(name: str, kind: str) -> web.Response:
    text = resources.files("pathways_ray.dashboard").joinpath("static", name).read_text(encoding="utf-8")
    return web.Response(text=text, content_type=kind, headers=HEADERS)


def serve(
    url: str,
    token: str,
    ca: str = "",
    port: int = 0,
    address: str = "127.0.0.1",
    started: Callable[[str], None] = print,
) -> None:
    """Serves the page of the cluster at `url` until the process ends.

    Args:
        token: the operator's, who sees everything, or a tenant's, who sees its own.
        port: 0 is a free one.
        started: gets the address of the page, with the page's own token.

    Raises:
        ValueError: the address is not loopback.
        OSError: the port is not free.
    """
    if not is_loopback(address):
        raise ValueError(f"the page is served on loopback only, not at {address}; reach it through ssh -L")
    page_token = secrets.token_urlsafe(24)

    def asking(question: messages.Look | messages.ReadLog) -> str:
        reply = call(url, token, question, ca=ca)
        return reply.text if isinstance(reply, messages.StatusReply | messages.LogPart) else "{}"

    async def main() -> None:
        dashboard = Dashboard(lambda: look(url, token, ca), asking, page_token)
        runner = dashboard.runner()
        await runner.setup()
        site = web.TCPSite(runner, address.strip("[]"), port)
        await site.start()
        bound = runner.addresses[0][1]
        dashboard.serves_at(address, bound)
        started(f"http://{address}:{bound}/?token={page_token}")
        await asyncio.Event().wait()

    asyncio.run(main())
