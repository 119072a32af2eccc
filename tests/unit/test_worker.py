"""Worker processes and the planner: answers, limits, crashes, and a new start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pathways_ray import limits
from pathways_ray.controller.planner import Planner
from pathways_ray.controller.planning import (
    MAX_RESULT_BYTES,
    PlanReply,
    PlanRequest,
    answer,
    plan_if_cheap,
    request_of,
    result_count,
)
from pathways_ray.controller.tenants import Quota, Tenant
from pathways_ray.ir.graph import Graph, Ref, Result
from pathways_ray.transport.messages import encode
from pathways_ray.worker import Worker, WorkerEnded, WorkerLate
from tests.unit.helpers import Sketch
from tests.waiting import until

TROUBLES = {
    "crash": ("import os; os.kill(os.getpid(), 11)", "its process crashed: SIGSEGV"),
    "loop": ("while True: pass", "it took more than 1 s of a core"),
    "sleep": ("import time; time.sleep(100)", "it took longer than 2 s"),
    "memory": ("x = bytearray(1 << 30)", "it needed more than 256 MiB of memory"),
    "error": ("raise ValueError('no')", "its process crashed: exit 1"),
}

SOURCE = """
from pathways_ray.worker import Limits, serve
def work(question):
    exec(question.decode())
    return b"answer to " + question
serve(work, Limits(cpu_s=1, time_s=20.0, memory_bytes=256 << 20))
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(("-c", SOURCE))
    yield made
    made.close()


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_fork_in_trouble_ends_with_the_reason_and_the_next_question_is_answered(worker: Worker, trouble: str) -> None:
    code, reason = TROUBLES[trouble]
    if trouble == "sleep":
        worker = Worker(("-c", SOURCE.replace("20.0", "2.0")))
    with pytest.raises(WorkerEnded, match=reason) as ended:
        worker.ask(code.encode())
    assert isinstance(ended.value, WorkerLate) == (trouble == "sleep")
    assert worker.ask(b"pass") == b"answer to pass"
    if trouble == "sleep":
        worker.close()


def test_a_fork_that_its_question_has_taken_over_may_say_what_is_no_text(worker: Worker) -> None:
    code = (
        "import os\nfor number in range(3, 20):\n    try: os.write(number, (2).to_bytes(8, 'big') + b'\\0\\xff')\n"
        "    except OSError: pass\nos._exit(0)"
    )
    with pytest.raises(WorkerEnded, match="\ufffd"):
        worker.ask(code.encode())
    assert worker.ask(b"pass") == b"answer to pass"


def test_a_fork_finds_nothing_of_the_question_before(worker: Worker) -> None:
    worker.ask(b"'of the first one'")
    code = (
        "import sys\nheld = sys._getframe(2).f_locals.items()\n"
        "found = [name for name, value in held if isinstance(value, bytes) and b'of the first one' in value]\n"
        "assert found == ['question'], found"
    )
    assert worker.ask(code.encode()) == b"answer to " + code.encode()


def test_a_worker_that_dies_is_started_again(worker: Worker) -> None:
    worker.ask(b"pass")
    assert worker._process is not None
    worker._process.kill()
    assert worker.ask(b"pass") == b"answer to pass"


HUGE = """
import sys
asks, says = sys.stdin.buffer, sys.stdout.buffer
while size := int.from_bytes(asks.read(8), "big"):
    question = asks.read(size)
    says.write((1 << 60).to_bytes(8, "big") if question == b"huge" else b"")
    says.write((size + 1).to_bytes(8, "big") + b"\\1" + question)
    says.flush()
"""


def test_an_answer_that_there_is_no_memory_for_is_not_taken_for_that_of_the_next_question() -> None:
    worker = Worker(("-c", HUGE), reply_bytes=1 << 62)
    with pytest.raises(MemoryError):
        worker.ask(b"huge")
    assert worker.ask(b"next") == b"next"
    worker.close()


ALONE = """
import time
from pathways_ray.worker import serve_alone
def work(question):
    exec(question.decode())
    return b"answer to " + question
serve_alone(work, 256 << 20, 1)
"""

BUSY = b"end = time.process_time() + 0.7\nwhile time.process_time() < end: pass"


def test_a_worker_without_forks_has_its_limit_for_each_question() -> None:
    worker = Worker(("-c", ALONE), forks=False)
    for _ in range(3):  # whose 2.1 s are more than 1 s, rounded up from what it took to start
        assert worker.ask(BUSY) == b"answer to " + BUSY
    with pytest.raises(WorkerEnded, match="it reached its limit of CPU time"):
        worker.ask(b"while True: pass")
    assert worker.ask(b"pass") == b"answer to pass"
    worker.close()


ASKS = """
import sys
from pathways_ray.worker import Worker
Worker(("-c", sys.argv[1]), forks=False).ask(sys.argv[2].encode())
"""


@pytest.mark.parametrize("how", ["time.sleep(1000)", "list(iter(int, 1))"])
def test_a_worker_without_forks_ends_with_who_asks_it_in_the_middle_of_a_question(tmp_path: Path, how: str) -> None:
    told = tmp_path / "pid"
    question = f"import os; open({str(told)!r}, 'x').write(str(os.getpid())); {how}"
    asking = subprocess.Popen([sys.executable, "-c", ASKS, ALONE.replace(", 1)", ", 1000)"), question])
    try:
        until(lambda: told.exists() and told.read_text())
    finally:
        asking.kill()
        asking.wait()
    until(lambda: not runs(int(told.read_text())))


def runs(pid: int) -> bool:
    """Whether a process has not ended; who reaps it may take its time."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# --- the planner ------------------------------------------------------------------------------------------------------


def chain(length: int, tenant: Tenant | None = None, text: bool = False) -> PlanRequest:
    sketch = Sketch("chain")
    here, there = sketch.slice("0.0", "0.1"), sketch.slice("1.0", island=1)
    value = sketch.argument(here)
    for number in range(length):
        value = sketch.call("f", value, slice=here if number % 2 else there)
    return request_of(encode(sketch.graph(value)), sketch.placement, True, tenant or Tenant("alice"), text)


def test_a_program_planned_in_the_planners_process_is_the_one_planned_here() -> None:
    planner = Planner()
    try:
        for request in (chain(3), chain(300), chain(3, text=True), chain(300, Tenant("bob", quota=Quota(nodes=9)))):
            assert planner.plan(request) == answer(request)
    finally:
        planner.close()


def test_a_small_program_is_planned_at_once_and_a_big_one_is_not() -> None:
    assert plan_if_cheap(chain(3)) == answer(chain(3))
    assert plan_if_cheap(chain(300)) is None
    broken = request_of(b"\xc1", {}, True, Tenant("alice"))
    reply = plan_if_cheap(broken)
    assert reply is not None
    assert reply.failure is not None
    assert reply.failure.kind == "WireError"
    assert (result_count(chain(3).graph), result_count(b"\xc1")) == (1, 0)


def test_of_a_graph_that_names_more_than_it_may_nothing_is_decoded_but_by_the_planner() -> None:
    """To make an object of each of millions of slices, or of results, takes the controller seconds."""
    sketch = Sketch("many")
    value = sketch.argument(sketch.slice("0.0"))
    for number in range(limits.MAX_SLICES):
        sketch.slice(f"0.{number}")
    request = request_of(encode(sketch.graph(value)), sketch.placement, True, Tenant("alice"))
    assert request.slices == ()
    assert answer(request).failure is not None
    few = encode(Graph("many", (), (), (Result((Ref(0),)),)))
    many = encode((None,) * MAX_RESULT_BYTES)  # which are no results, as decoding them would show
    assert result_count(few.replace(encode((Ref(0),)), many)) == limits.MAX_RESULTS
    assert result_count(few.replace(encode((Ref(0),)), many[:1])) == 0


def test_without_a_planner_big_programs_are_refused() -> None:
    planner = Planner()
    planner._worker = Worker(("-c", "pass"))
    reply = planner.plan(chain(3))
    assert reply == PlanReply(failure=reply.failure, again=True)
    failure = reply.failure
    assert failure is not None
    assert failure.kind == "ProgramRefused"
    assert "cannot be planned" in failure.message


def test_a_program_that_a_busy_machine_kept_from_the_planner_may_be_registered_again() -> None:
    planner = Planner()
    late = SOURCE.replace("exec(question.decode())", "import time; time.sleep(100)").replace("20.0", "0.2")
    planner._worker = Worker(("-c", late))
    reply = planner.plan(chain(3))
    planner.close()
    assert reply.failure is not None
    assert reply.again
    assert "it took longer than 0 s" in reply.failure.message


def test_a_program_over_the_planners_limits_is_refused_with_the_figures() -> None:
    planner = Planner()
    planner._worker = Worker(("-c", SOURCE.replace("exec(question.decode())", "exec('while True: pass')")))
    reply = planner.plan(chain(3))
    planner.close()
    failure = reply.failure
    assert failure is not None
    assert not reply.again, "it would take as much of the planner's time once more"
    assert failure.kind == "ProgramRefused"
    assert "could not be planned: it took more than 1 s of a core" in failure.message
