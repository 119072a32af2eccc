"""A benchmark of one peer that hangs, ended from outside."""

from __future__ import annotations

import contextlib
import sys

from benchmarks.peers import process

with process.leaving_nothing():
    peer = process.PeerProcess(sys.executable, ["fake_peer"], {"PYTHONPATH": sys.argv[1]})
    with contextlib.closing(peer):
        peer.ask("configure", 30, hosts=1, devices=1)
        print(int(peer.ask("run", 30, mode="child", payload="noop", count=1)["value"][0]), flush=True)
        peer.ask("run", 60, mode="hang", payload="noop", count=1)
