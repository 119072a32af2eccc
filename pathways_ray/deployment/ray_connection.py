"""Joining a Ray cluster, or starting one on this machine.

Who reaches Ray's ports runs code with the rights of its processes. So a Ray that starts here listens on loopback only,
and asks every user of this machine for a token.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from pathways_ray import forks
from pathways_ray.compat import ray_dials, ray_forgets_token, ray_found, ray_has_token, ray_on_loopback
from pathways_ray.deployment.fork_server import ForkServer
from pathways_ray.deployment.ray_processes import few_processes, whole_or_none, without_agents
from pathways_ray.errors import AuthenticationError, UsageError

Leave = Callable[[], None]


def connect_ray(address: str | None, options: dict[str, Any], server: ForkServer | None = None) -> Leave | None:
    """Joins or starts Ray.

    Args:
        server: what a Ray that starts here has its workers forked by; left out, it has processes of its own.

    Returns:
        What ends that again: the connection to an existing cluster, or a cluster that was started here. None when this
        process was connected before, which is then not ours to end.
    """
    if ray.is_initialized():
        return None
    if address is not None:
        try:
            where = _found() if address == "auto" else address
            if where == "local":
                said = "RAY_ADDRESS" if address == "auto" else "the address"
                raise UsageError(
                    f"a Ray cluster at 'local' ends with this process, and the runtime with it: leave out {said}; "
                    "'ray start --head' starts one that stays"
                )
            _check_reachable(where)
            ray.init(**{"address": where, "log_to_driver": False, "logging_level": "ERROR", **options})
        except KeyboardInterrupt:
            ray.shutdown()  # a connection that nobody owns would be taken for the user's
            raise
        except (OSError, ValueError, RuntimeError, ray.exceptions.AuthenticationError) as error:
            if _is_about_tokens(error):
                raise AuthenticationError(
                    f"the Ray cluster at {address!r} wants a token that it knows: set RAY_AUTH_MODE=token, and "
                    "RAY_AUTH_TOKEN to what 'ray get-auth-token' prints where it was started"
                ) from error
            raise UsageError(f"no Ray cluster at {address!r} ({error}); start one with 'ray start --head'") from error
        return ray.shutdown
    defaults = {
        "address": "local",
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "object_store_memory": 100 << 20,  # no array goes through Ray
    }
    leave = contextlib.ExitStack()
    if server is not None:
        leave.callback(server.close)
    leave.enter_context(_token())
    leave.callback(_end_ray)
    try:
        # Ray gives its workers a low priority, hosts included: on a busy machine clients would push their hosts aside.
        # And it asks a process that is to be killed for five seconds to end by itself, which a stopped one never does.
        # Workers that it starts ahead are nobody's, and actors take others (`forks` has those of one job).
        settings = {
            "RAY_worker_niceness": "0",
            "RAY_kill_worker_timeout_milliseconds": "500",
            "RAY_prestart_worker_first_driver": "0",
        }
        with contextlib.ExitStack() as starting:
            starting.enter_context(_environment(settings))
            os.environ.pop(forks.SOCKET, None)  # of the runtime that a function of this process's parent may run on
            if server is not None:
                starting.enter_context(_environment({forks.SOCKET: server.readers}))
                starting.enter_context(without_agents(server))
            starting.enter_context(ray_on_loopback())
            starting.enter_context(few_processes())
            starting.enter_context(whole_or_none())
            _in_a_thread_that_stays(lambda: ray.init(**{**defaults, **options}))
    except BaseException:
        leave.close()
        raise
    return leave.close


def _end_ray() -> None:
    """Ends the Ray that was started here, also where that is interrupted: its processes would stay as long as this."""
    try:
        ray.shutdown()
    except BaseException:
        ray.shutdown()
        raise


@contextlib.contextmanager
def _token() -> Iterator[None]:
    """Has Ray ask for a token: the user's, where there is one, or else one of this cluster only, in this environment.
    (Ray itself would write one into the user's home.) A user who has set a mode gets that."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        yield
        return
    known = {} if ray_has_token() else {"RAY_AUTH_TOKEN": secrets.token_hex(16)}
    try:
        with _environment({"RAY_AUTH_MODE": "token", **known}):
            ray_forgets_token()
            yield
    finally:
        ray_forgets_token()


def _in_a_thread_that_stays(call: Callable[[], Any]) -> None:
    """Calls it in a thread that ends with the process: Linux ends Ray's processes with the thread that started them,
    and `pw.init` may be called in one that is soon over (`asyncio.to_thread`)."""
    if threading.current_thread() is threading.main_thread():
        call()
        return
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
            threading.Event().wait()

    threading.Thread(target=run, name="pathways-ray", daemon=True).start()
    done.result()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables, unless the user has, for what is started meanwhile."""
    ours = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in ours})
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _found() -> str:
    """The address that "auto" is: what RAY_ADDRESS says, or what `ray start` left in a file, or a Ray that runs."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return os.environ.get("RAY_ADDRESS") or (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    return ray_found()


def _check_reachable(address: str) -> None:
    """Raises `OSError` where nothing listens at what Ray dials for it: Ray itself would go on trying for minutes.

    A Ray that listens on loopback alone, as that of another `pw.init` does, is not there for who does not say so.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        socket.create_connection((ray_dials(host.strip("[]")), int(port)), timeout=5.0).close()


def _is_about_tokens(error: BaseException | None) -> bool:
    """Whether Ray's error, or one it came from, is that a token is missing or wrong."""
    while error is not None:
        if isinstance(error, ray.exceptions.AuthenticationError) or "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def cause_text(error: BaseException) -> str:
    """The cause that Ray names for the end of a process, in a line: the last one of a traceback, which Ray logs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) < 2:
        return str(error)
    return f"{lines[-1]} (session_latest/logs in Ray's folder, by default /tmp/ray, has more)"
