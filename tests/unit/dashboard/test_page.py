"""The page's script, run by Node in place of a browser, with just enough of a document."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources

import pytest

NODE = shutil.which("node")

BROWSER = """
"use strict";
const streams = [], waits = [], parts = {};
const element = () => ({ dataset: {}, addEventListener() {} });
globalThis.document = { getElementById: (id) => (parts[id] = parts[id] || element()), body: element() };
globalThis.setTimeout = (what) => waits.push(what);
globalThis.EventSource = class {
  constructor() { this.readyState = EventSource.CONNECTING; streams.push(this); }
  addEventListener() {}
};
Object.assign(EventSource, { CONNECTING: 0, OPEN: 1, CLOSED: 2 });
"""


@pytest.mark.skipif(NODE is None, reason="no Node here")
def test_a_page_that_was_refused_asks_again() -> None:
    """1. Of a lost connection the browser itself makes another one. 2. Of a refusal, such as 503, it does not."""
    script = resources.files("pathways_ray.dashboard").joinpath("static", "page.js").read_text(encoding="utf-8")
    checks = """
    streams[0].onerror();
    console.log(streams.length, waits.length);
    streams[0].readyState = EventSource.CLOSED;
    streams[0].onerror();
    for (const what of waits) what();
    console.log(streams.length, waits.length);
    """
    assert NODE is not None
    ran = subprocess.run([NODE, "-"], input=BROWSER + script + checks, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.split()) == (0, ["1", "0", "2", "1"]), ran.stderr
