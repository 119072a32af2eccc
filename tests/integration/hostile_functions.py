"""Host functions that do what nobody expects: each takes a float32[4] and a folder's path, as bytes, from its closure.

`CASES` has them by name with what comes of a call: the text of its error, or `FINE` where it gives `v + 1`. What keeps
running writes its process id into the folder.
"""

from __future__ import annotations

import builtins
import ctypes
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FINE = ""
LATE = r"did not return within 0.3 s; its process was killed"
FOLDER = Path()
"""Where processes that are left behind write their numbers; set for each test."""


class Case(NamedTuple):
    """A function, and a pattern of what its call's error says."""

    function: Callable[[Any], Any]
    said: str
    limit_s: float = 60.0


CASES: dict[str, Case] = {}


def case(said: str = FINE, limit_s: float = 60.0) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        CASES[function.__name__] = Case(function, said, limit_s)
        return function

    return add


def stays(folder: Path) -> None:
    """Writes the number of this process, and sleeps."""
    (folder / str(os.getpid())).touch()
    time.sleep(1000)


# --- raises -----------------------------------------------------------------------------------------------------------


class Own(BaseException):
    pass


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(9)


@case("raises raised ValueError: no")
def raises(v: Any) -> Any:
    raise ValueError("no")


@case("raises_no_exception raised Own: no")
def raises_no_exception(v: Any) -> Any:
    raise Own("no")


@case("leaves raised SystemExit: 3")
def leaves(v: Any) -> Any:
    sys.exit(3)


@case("is_interrupted raised KeyboardInterrupt")
def is_interrupted(v: Any) -> Any:
    raise KeyboardInterrupt


@case("stops_iterating raised StopIteration")
def stops_iterating(v: Any) -> Any:
    return next(iter(()))


@case("cannot_be_pickled raised Locked: locked")
def cannot_be_pickled(v: Any) -> Any:
    raise Locked


@case(r"has_no_text raised Mute: \(its text failed: SystemExit\)")
def has_no_text(v: Any) -> Any:
    raise Mute


@case(r"has_much_text raised ValueError: x{1000}")
def has_much_text(v: Any) -> Any:
    raise ValueError("x" * (10 << 20))


@case("has_odd_text raised KeyError")
def has_odd_text(v: Any) -> Any:
    raise KeyError("\ud800\0\x1b[2J")


@case("goes_round raised RecursionError")
def goes_round(v: Any) -> Any:
    return goes_round(v)


@case("raises_many raised ExceptionGroup: many")
def raises_many(v: Any) -> Any:
    raise ExceptionGroup("many", [ExceptionGroup("of them", [ValueError(str(k)) for k in range(1000)])] * 10)


@case("is_its_own_cause raised ValueError: first")
def is_its_own_cause(v: Any) -> Any:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


@case("has_an_odd_class raised a\nb: no")
def has_an_odd_class(v: Any) -> Any:
    raise type("a\nb", (Exception,), {})("no")


@case("asserts raised AssertionError")
def asserts(v: Any) -> Any:
    assert v is None


@case("imports raised ModuleNotFoundError")
def imports(v: Any) -> Any:
    import no_such_module  # type: ignore[import-not-found]

    return no_such_module.f(v)


@case("is_no_python raised SyntaxError")
def is_no_python(v: Any) -> Any:
    exec("1 +")


@case("reads raised EOFError")
def reads(v: Any) -> Any:
    return input()


@case("runs_a_command raised CalledProcessError")
def runs_a_command(v: Any) -> Any:
    subprocess.run(["sh", "-c", "exit 1"], check=True)


@case("wants_memory raised MemoryError")
def wants_memory(v: Any) -> Any:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (64 << 20), hard))
    try:
        return [bytearray(1 << 20) for _ in range(1 << 20)]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@case("opens_files raised OSError: .*Too many open files")
def opens_files(v: Any) -> Any:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    while True:
        os.open("/dev/null", os.O_RDONLY)


# --- does not come back -----------------------------------------------------------------------------------------------


@case("sleeps " + LATE, 0.3)
def sleeps(v: Any) -> Any:
    time.sleep(1000)


@case("spins " + LATE, 0.3)
def spins(v: Any) -> Any:
    while True:
        pass


@case("listens_to_no_signal " + LATE, 0.3)
def listens_to_no_signal(v: Any) -> Any:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 60))
    time.sleep(1000)


@case("keeps_the_interpreter " + LATE, 0.3)
def keeps_the_interpreter(v: Any) -> Any:
    ctypes.PyDLL(None).sleep(1000)


@case("locks_itself_out " + LATE, 0.3)
def locks_itself_out(v: Any) -> Any:
    lock = threading.Lock()
    with lock, lock:
        return v


@case("stands_still " + LATE, 0.3)
def stands_still(v: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


@case("hangs_with_children " + LATE, 0.3)
def hangs_with_children(v: Any) -> Any:
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            break
    stays(FOLDER)


# --- prints -----------------------------------------------------------------------------------------------------------


@case()
def prints_many_lines(v: Any) -> Any:
    for _ in range(1000):
        print("a line of some length\n" * 1000)
    return v + 1


@case()
def prints_one_line(v: Any) -> Any:
    for _ in range(20):
        print("x" * (1 << 20), end="")
    return v + 1


@case()
def prints_no_text(v: Any) -> Any:
    os.write(1, bytes(range(256)) * 1000)
    os.write(2, b"\0" * 100_000)
    return v + 1


@case()
def closes_its_output(v: Any) -> Any:
    sys.stdout.close()
    sys.stderr.close()
    return v + 1


@case()
def replaces_its_output(v: Any) -> Any:
    class Broken:
        def flush(self) -> None:
            raise SystemExit(1)

    sys.stdout, sys.stderr = Broken(), None
    return v + 1


@case()
def closes_standard_files(v: Any) -> Any:
    os.closerange(0, 3)
    return v + 1


@case("the process of closes_all_files ended")
def closes_all_files(v: Any) -> Any:
    os.closerange(0, 4096)
    return v + 1


@case("closes_its_calls has closed the pipe by which its process is called")
def closes_its_calls(v: Any) -> Any:
    os.close(int(sys.argv[1]))
    return v + 1


@case(r"the process of writes_an_answer ended .*a frame of \d+ bytes")
def writes_an_answer(v: Any) -> Any:
    os.write(int(sys.argv[2]), b"\xff" * 64)
    return v + 1


# --- starts processes, ends its own -----------------------------------------------------------------------------------


@case()
def forks(v: Any) -> Any:
    return v + 1 + (os.fork() == 0)


@case()
def leaves_a_child(v: Any) -> Any:
    if os.fork() == 0:
        stays(FOLDER)
    return v + 1


@case()
def leaves_many_children(v: Any) -> Any:
    called = os.getpid()
    for _ in range(5):
        os.fork()
    if os.getpid() != called:
        stays(FOLDER)
    return v + 1


@case()
def leaves_a_daemon(v: Any) -> Any:
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            stays(FOLDER)
        os._exit(0)
    os.waitpid(child, 0)
    return v + 1


@case(r"the process of leaves_a_daemon_and_ends ended \(exit status 3\)")
def leaves_a_daemon_and_ends(v: Any) -> Any:
    leaves_a_daemon(v)
    os._exit(3)


@case(r"the process of leaves_a_child_and_ends ended \(exit status 4\)")
def leaves_a_child_and_ends(v: Any) -> Any:
    leaves_a_child(v)
    os._exit(4)


@case()
def leaves_a_thread(v: Any) -> Any:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    threading.Thread(target=lambda: 1 / 0).start()
    return v + 1


@case()
def computes_in_processes(v: Any) -> Any:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return np.array(pool.map(abs, list(v + 1)), np.float32)


@case(r"the process of ends ended \(exit status 0\)")
def ends(v: Any) -> Any:
    os._exit(0)


@case(r"the process of aborts ended \(SIGABRT\)")
def aborts(v: Any) -> Any:
    os.abort()


@case(r"the process of reads_at_zero ended \(SIGSEGV\)")
def reads_at_zero(v: Any) -> Any:
    ctypes.string_at(0)


@case(r"the process of kills_itself ended \(SIGKILL\)")
def kills_itself(v: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@case(r"the process of kills_its_parent ended \(SIGKILL\)")
def kills_its_parent(v: Any) -> Any:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


@case(r"the process of kills_its_group ended \(SIGKILL\)")
def kills_its_group(v: Any) -> Any:
    os.killpg(0, signal.SIGKILL)


@case(r"the process of becomes_another_program ended")
def becomes_another_program(v: Any) -> Any:
    os.execvp("sleep", ["sleep", "1000"])


# --- gives what it should not -----------------------------------------------------------------------------------------


class Array:
    """Something that NumPy asks for an array."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.act()


class Kept(np.ndarray[Any, Any]):
    def astype(self, *_: Any, **__: Any) -> Any:
        raise SystemExit(1)


@case(r"result 0 has shape \(2,\), and should have \(4,\)")
def gives_another_shape(v: Any) -> Any:
    return v[:2]


@case("result 0 has dtype complex64, which does not become float32")
def gives_another_type(v: Any) -> Any:
    return v + 1j


@case(r"result 0 is a dict of \['x'\]")
def gives_another_tree(v: Any) -> Any:
    return {"x": v}


@case("result 0 is None, and should be an array")
def gives_nothing(v: Any) -> Any:
    pass


@case("result 0 is a generator, and should be an array")
def yields(v: Any) -> Any:
    yield v


@case("result 0 is a coroutine, and should be an array")
async def awaits(v: Any) -> Any:
    return v


@case("result 0 is a str, and should be an array")
def gives_a_text(v: Any) -> Any:
    return "text"


@case("did not return what its result= says")
def gives_rows_of_many_lengths(v: Any) -> Any:
    return [[1.0], [1.0, 2.0]]


@case(r"result 0 has shape \(67108864,\)")
def gives_much(v: Any) -> Any:
    return np.zeros(1 << 26, np.float32)


@case("did not return what its result= says: not an array")
def gives_what_raises(v: Any) -> Any:
    def act() -> Any:
        raise ValueError("not an array")

    return Array(act)


@case("did not return what its result= says: 7")
def gives_what_leaves(v: Any) -> Any:
    return Array(lambda: sys.exit(7))


@case("gives_what_hangs " + LATE, 0.3)
def gives_what_hangs(v: Any) -> Any:
    return Array(lambda: time.sleep(1000))


@case()
def gives_an_array_of_its_own_class(v: Any) -> Any:
    return (v + 1).astype(np.float64).view(Kept)


@case()
def gives_an_odd_array(v: Any) -> Any:
    return np.asfortranarray((v + 1).astype(">f8")[::-1])[::-1]


@case()
def gives_a_masked_array(v: Any) -> Any:
    return np.ma.masked_array(v + 1, mask=[False] * 4)


# --- changes what is around it ----------------------------------------------------------------------------------------


@case()
def changes_its_input(v: Any) -> Any:
    v += 1
    return v


@case()
def changes_its_surroundings(v: Any) -> Any:
    os.chdir("/")
    os.environ.clear()
    os.umask(0)
    os.nice(5)
    sys.path.clear()
    sys.setrecursionlimit(10_000)
    return v + 1


@case("breaks_numpy did not return what its result= says|the process of breaks_numpy ended")
def breaks_numpy(v: Any) -> Any:
    np.asarray = np.ascontiguousarray = None  # type: ignore[assignment]
    return v + 1


@case("the process of breaks_python ended")
def breaks_python(v: Any) -> Any:
    builtins.len = builtins.isinstance = builtins.str = None  # type: ignore[assignment,misc]
    return v + 1


@case("the process of traces_all ended|raised ZeroDivisionError|did not return what its result= says")
def traces_all(v: Any) -> Any:
    def trace(*_: Any) -> Any:
        raise ZeroDivisionError

    sys.settrace(trace)
    return v + 1


class Loaded:
    """Acts when it is unpickled."""

    def __init__(self, act: Callable[..., Any], *arguments: Any) -> None:
        self.made = act, arguments

    def __reduce__(self) -> Any:
        return self.made


_ENDS, _FAILS = Loaded(os._exit, 7), Loaded(int, "x")


def closure_of(held: Any) -> Callable[[Any], Any]:
    def holds(v: Any) -> Any:
        return held and v

    return holds


CASES["ends_as_it_is_loaded"] = Case(closure_of(_ENDS), r"the process of holds ended \(exit status 7\)")
CASES["fails_as_it_is_loaded"] = Case(closure_of(_FAILS), "holds raised ValueError: invalid literal")

LINE = re.compile(r"(hostile_functions|test_hostile_functions)\.py:\d+")
"""Of what every error names."""
