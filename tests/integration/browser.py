"""A headless Chromium, driven by its own protocol: what a page shows, and a picture of it."""

# ruff: noqa: ASYNC220, ASYNC240 - small files, and a process that starts at once

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_LIMIT_S = 60.0


class Browser:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the protocol. What the page complains of meanwhile is in `problems`."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=START_LIMIT_S)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            if message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(str(message["params"])[:500])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return found["result"].get("value")

    async def until(self, script: str, limit_s: float = 60.0) -> Any:
        """The first value of an expression that is true."""
        async with asyncio.timeout(limit_s):
            for _ in itertools.count():
                if found := await self.value(script):
                    return found
                await asyncio.sleep(0.1)

    async def picture(self, path: Path) -> None:
        """Writes a picture of the page."""
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--hide-scrollbars",
                "--disable-background-networking",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Browser(socket)
        finally:
            process.kill()
            process.wait()


async def _port(path: Path) -> int:
    async with asyncio.timeout(START_LIMIT_S):
        for _ in itertools.count():
            if path.exists() and (lines := path.read_text().splitlines()):
                return int(lines[0])
            await asyncio.sleep(0.1)
    raise AssertionError
