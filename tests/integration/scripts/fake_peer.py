"""A peer for tests: it answers, fails, ends or hangs, as its mode says."""

from __future__ import annotations

import os
import subprocess
import time

from benchmarks.peers import protocol


class Fake(protocol.System):
    packages: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.payloads = {"noop": "nothing"}
        self.modes = protocol.for_both_payloads("opbyop")

    def configure(self, hosts: int, devices: int) -> None:
        print("a library that prints")
        subprocess.run(["echo", "and a child that does"])
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.n, self.child = hosts * devices, child.pid

    def prepare(self, mode: str, payload: str, count: int) -> None:
        pass

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        if mode == "fail":
            raise ValueError("as told")
        if mode == "end":
            print("my last words")
            os._exit(3)
        if mode == "hang":
            time.sleep(600)
        return [self.child if mode == "child" else protocol.START + count] * self.n

    def release(self, mode: str, payload: str) -> None:
        pass

    def close(self) -> None:
        pass


protocol.serve(Fake())
