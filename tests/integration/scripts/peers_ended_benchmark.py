"""A benchmark of one peer that hangs, ended from outside."""

from __future__ import annotations

import sys

from benchmarks.peers import process

process.end_in_order()
process.adopt_orphans()
peer = process.PeerProcess(sys.executable, ["fake_peer"], {"PYTHONPATH": sys.argv[1]})
try:
    peer.ask("configure", 30, hosts=1, devices=1)
    print(int(peer.ask("run", 30, mode="child", payload="noop", count=1)["value"][0]), flush=True)
    peer.ask("run", 60, mode="hang", payload="noop", count=1)
finally:
    peer.close()
    process.end_orphans()
