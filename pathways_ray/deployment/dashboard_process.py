"""The process of the live page that `pw.init(dashboard=True)` starts; it ends with the session."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys

from pathways_ray.client.api import ClusterSession
from pathways_ray.errors import PathwaysError

START_LIMIT_S = 30.0


def show(session: ClusterSession) -> ClusterSession:
    """Starts the page of a session's cluster, or closes the session where that fails."""
    try:
        session.dashboard = DashboardProcess(session.url, session.token, session.cluster.ca)
    except BaseException:
        session.close()
        raise
    return session


class DashboardProcess:
    """A running page. `url` opens it in a browser on this machine; it has a token of its own.

    Args:
        url, token, ca: of the cluster.

    Raises:
        PathwaysError: it did not start in time.
    """

    def __init__(self, url: str, token: str, ca: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pathways_ray.dashboard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # an interrupt from the terminal is for this process
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        started = select.poll()  # `select.select` takes no descriptor beyond 1,023
        started.register(self.process.stdout, select.POLLIN)
        try:
            self.process.stdin.write(json.dumps({"url": url, "token": token, "ca": ca}) + "\n")
            self.process.stdin.flush()
            self.url = self.process.stdout.readline().strip() if started.poll(1000 * START_LIMIT_S) else ""
            if not self.url:
                raise PathwaysError(f"the page's process did not start within {START_LIMIT_S:.0f} s")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends it. Twice is fine."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
            return
        self.process.kill()
        self.process.wait()
