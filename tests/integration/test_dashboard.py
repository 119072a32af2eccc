"""The live page in a browser: over a real cluster, and over one that is simulated to be large.

With PATHWAYS_PICTURES=1 the pictures of docs/pictures are made again.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import aiohttp
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.dashboard.server import Dashboard
from pathways_ray.deployment.dashboard_process import DashboardProcess
from pathways_ray.observe.views import Dispatched
from tests.integration.browser import CHROMIUM, browser
from tests.integration.conftest import ROOT
from tests.unit.observe.snapshots import host, island, snapshot, view

PICTURES = ROOT / "docs" / "pictures"
HOSTS, SESSIONS = 512, 100

with_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: Debian has it as chromium")


async def picture(page: Any, name: str) -> None:
    if os.environ.get("PATHWAYS_PICTURES"):
        await page.picture(PICTURES / name)


def spinning(v: jax.Array) -> jax.Array:
    return v + jax.lax.fori_loop(0, 250_000_000, lambda k, c: c * 3 + k, 1).astype(v.dtype) * 0


def double(v: jax.Array) -> jax.Array:
    return v * 2


@with_browser
def test_the_page_shows_a_cluster_at_work_and_says_why(session, slices) -> None:
    """1. A long launch is on island 0, others wait behind it, and a program goes over both islands. 2. The page shows
    devices, launches, graph and transfers. 3. A click on a launch says why it is not over."""
    long = pw.compiled(spinning, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    there = pw.compiled(double, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    over = pw.program(lambda v: there(there(long(v))), name="over both islands")
    v = pw.put(np.arange(8.0), slice=slices.a4, spec=P("x"))
    over(v).block_until_ready()
    page_process = DashboardProcess(session.url, session.token, "")
    looked = threading.Event()

    def keep_busy() -> None:
        """Three launches at any time, for as long as the browser takes."""
        flying = deque(over(v) for _ in range(3))
        while not looked.is_set():
            flying.popleft().block_until_ready()
            flying.append(over(v))
        for result in flying:
            result.block_until_ready()

    work = threading.Thread(target=keep_busy)
    work.start()

    async def look() -> None:
        async with browser() as page:
            await page.open(page_process.url)
            await page.until("document.querySelectorAll('.device.runs').length >= 4")
            await page.until("document.querySelector('#launches tbody tr') !== null")
            text = await page.value("document.body.innerText")
            for word in ("island 0 (cpu) up", "over both islands", "live", "launches", "events"):
                assert word in text
            await page.value("document.querySelector('#launches tbody tr').click()")
            await page.until("document.getElementById('why').innerText.includes('over both islands')")
            await page.value("document.querySelectorAll('#programs details').forEach((one) => { one.open = true; })")
            await page.until("document.querySelector('#programs svg rect') !== null")
            await page.until("document.querySelector('#transfers .matrix') !== null")
            assert "token" not in await page.value("location.href")
            await picture(page, "dashboard.png")
            assert page.problems == []

    try:
        asyncio.run(look())
    finally:
        looked.set()
        page_process.stop()
        work.join()


def large(round: int) -> dict[str, Any]:
    """512 hosts in 64 islands with 100 sessions; in each round other sessions are on the devices."""
    found = snapshot(
        islands=[island(k, *(host(8 * k + j, 4) for j in range(8))) for k in range(HOSTS // 8)],
        sessions=[
            {
                "session": k,
                "name": f"client {k}",
                "tenant": f"tenant {k % 7}",
                "programs": 3,
                "buffers": 10,
                "bytes": 1 << 20,
                "in_flight": round % 5,
                "waiting": 0,
            }
            for k in range(SESSIONS)
        ],
    )
    found["islands"] = {str(k): view(island=k, hosts=tuple(range(8 * k, 8 * k + 8))) for k in range(HOSTS // 8)}
    sent = Dispatched(640, 2, "bob", "step", 1.5, (0,), tuple(f"{host}.{k}" for host in range(4) for k in range(4)))
    found["islands"]["0"] = view(island=0, hosts=tuple(range(8)), dispatched=(sent,))
    for one in found["status"]["islands"]:
        for machine in one["hosts"]:
            for k, device in enumerate(machine["devices"]):
                device["slices"] = [f"session {(machine['host'] + k + round) % SESSIONS}: slice 1"]
    found["overview"]["transfers"] = [(a, b, (a + 1) * (b + 2) * 1000) for a in range(40) for b in range(40) if a != b]
    return found


@with_browser
def test_the_page_of_a_large_cluster_follows_it() -> None:
    """What comes is shown within seconds, also while 40 other browsers have the page open, and over a time without the
    controller and without the page's own server."""
    rounds = [0]
    away: list[str] = []

    def looking() -> dict[str, Any]:
        if away:
            raise pw.errors.UsageError(away[0])
        rounds[0] += 1
        return large(rounds[0])

    async def look() -> None:
        dashboard = Dashboard(looking, lambda question: "{}", "t")
        runner = aiohttp.web.AppRunner(dashboard.app(), shutdown_timeout=0.1)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        dashboard.serves_at("127.0.0.1", port)
        async with browser() as page:
            await page.open(f"http://127.0.0.1:{port}/?token=t")
            await page.until(f"document.querySelectorAll('.device').length === {4 * HOSTS}")
            assert await page.value("document.querySelectorAll('#sessions tbody tr').length") == SESSIONS
            await picture(page, "dashboard-large.png")
            before = await page.value("document.querySelector('.device').title")
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as others:
                shown = {"Authorization": "Bearer t"}
                url = f"http://127.0.0.1:{port}/events"
                streams = [await others.get(url, headers=shown) for _ in range(40)]
                await page.until(f"document.querySelector('.device').title !== {before!r}")
                for stream in streams:
                    stream.close()
            away.append("no cluster answers")
            await page.until("document.getElementById('state').innerText.includes('no cluster answers')")
            away.clear()
            await page.until("document.getElementById('state').innerText === 'live'")
            assert page.problems == []
        await runner.cleanup()

    asyncio.run(look())


def test_a_command_serves_the_page_of_a_cluster(session, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pathways_ray.cli", "dashboard", "--url", session.url]
    environment = {**os.environ, "PATHWAYS_TOKEN": session.token, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        base, _, token = url.partition("/?token=")

        async def look() -> str:
            async with (
                aiohttp.ClientSession() as reader,
                reader.get(f"{base}/events", headers={"Authorization": f"Bearer {token}"}) as stream,
            ):
                deadline, text = time.monotonic() + 60, b""
                while b"event: devices" not in text and time.monotonic() < deadline:
                    text += await stream.content.readline()
                return text.decode()

        assert "event: devices" in asyncio.run(look())
        assert session.token not in url
    finally:
        process.terminate()
        process.communicate()
