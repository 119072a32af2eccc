"""Reinforcement learning over two islands: modes, two jobs at once, and the way of the weights.

The program of `examples/rl`, with sampler and learner on an island of one device each, and each device with a core of
its own where there are two. *Modes*: the time of a step, and the share of the time in which each island's device
computed. *Two jobs*: each in a process of its own, as a tenant of its own, on the same devices; steps in a second of
both at once, divided by those of one after the other. Losses, rewards and parameters have to have the bits of the job
alone. Two at once cannot be faster than the cores: from the processor time of a job alone, of all processes, follows
the most that the ratio can be. The same two jobs run as processes of plain JAX, with no runtime, in the same rounds,
each with its two devices on the same two cores. All of that again with rewards that wait for some ms, as for a service:
then a job leaves devices and cores idle, which the other one may use. *Weights*: a tree of so many bytes is pushed by
`pw.versioned`, until it is there; bytes in a second, divided by those of a raw socket, in turn; and the bytes that the
controller sends and receives for it over TCP, without those of as much idle time.

Run it with `python -m benchmarks run rl --json rl.json`; it takes about eight minutes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.bytes import MIB, Raw
from benchmarks.cores import devices_apart
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.workers import Worker, ask_all

LIMIT_S = 240.0
WARM_STEPS = 3


@dataclass(frozen=True)
class Settings:
    steps: int = option(30, "of each run")
    sizes: tuple[int, ...] = option((4, 64), "of the weights that are pushed, in MiB")
    pushes: int = option(10, "of each size in each round")
    reward_ms: tuple[float, ...] = option((0.0, 100.0), "that the rewards of two jobs wait for a service")
    rounds: int = option(3, "of everything")


SMOKE = Settings(steps=2, sizes=(1,), pushes=2, reward_ms=(5.0,), rounds=1)


class Client:
    """A job in a process of its own, on one device of each of two islands."""

    def __init__(self, url: str, token: str, seed: int) -> None:
        import pathways_ray as pw
        from examples.rl import loops

        self.session = pw.connect(url, token, name=f"rl {seed}")
        self.sampler, self.learner = (pw.virtual_slice((1,), (axis,), island=k) for k, axis in enumerate("xt"))
        self.loops, self.seed = loops, seed
        self.wait_for_rewards(0.0)

    def wait_for_rewards(self, ms: float) -> None:
        """Has the rewards of what follows take so long."""
        grade_after(ms)
        self.job = self.loops.Job(self.sampler, self.learner, seed=self.seed)

    def run(self, mode: str, steps: int) -> dict[str, Any]:
        """Runs from the start: when it began and ended, seconds of each step, and a digest of what came of it."""
        self._begin_again()
        begun, cpu = time.perf_counter(), time.process_time()
        found = self.loops.run(self.job, mode, steps)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        leaves = [np.asarray([step[:3] for step in found.steps]), *_leaves(found.params)]
        digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
        times = [step.seconds for step in found.steps]
        return {"begun": begun, "ended": ended, "cpu": cpu, "steps": times, "digest": digest}

    def _begin_again(self) -> None:
        import jax

        import pathways_ray as pw
        from examples.rl import grpo, model

        start = jax.device_get(grpo.start(model.init(self.seed)))
        self.job.state = pw.put(start, self.learner, self.loops.STATE)
        self.job.weights = pw.versioned(self.job.state.params, slice=self.sampler, spec=jax.P(), max_lag=0)

    def close(self) -> None:
        self.session.close()


class Plain:
    """The same job in a process of plain JAX, with a device for the sampler and one for the learner."""

    def __init__(self, seed: int) -> None:
        import jax

        jax.config.update("jax_num_cpu_devices", 2)
        from examples.rl import loops

        self.loops, self.seed = loops, seed

    def wait_for_rewards(self, ms: float) -> None:
        grade_after(ms)

    def run(self, mode: str, steps: int) -> dict[str, Any]:
        """As that of `Client`, on-policy."""
        begun, cpu = time.perf_counter(), time.process_time()
        self.loops.plain(steps, seed=self.seed)
        return {"begun": begun, "ended": time.perf_counter(), "cpu": time.process_time() - cpu, "digest": ""}


def grade_after(ms: float) -> None:
    """Has the example in this process wait so long for the rewards of each batch."""
    from examples.rl import task

    grade = getattr(task.grade, "__wrapped__", task.grade)

    @functools.wraps(grade)
    def waits(tokens: Any) -> Any:
        time.sleep(ms / 1000)
        return grade(tokens)

    vars(task)["grade"] = waits


def _leaves(tree: Any) -> list[Any]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on a cluster of its own."""
    import pathways_ray as pw

    with (
        devices_apart(hosts=2) as apart,
        pw.init(islands=2, devices_per_host=1) as session,
        contextlib.ExitStack() as s,
    ):
        clients = [Worker(Client, session.url, session.token, seed, daemon=False) for seed in (0, 1)]
        plain = [Worker(Plain, seed) for seed in (0, 1)]
        for worker in (*clients, *plain):
            s.callback(worker.close, 20.0)
        for worker in (*clients, *plain):
            worker.answer()
        kinds = {"tenants": clients, "plain JAX": plain}
        modes = [one_mode(clients[0], mode, settings, progress) for mode in ("on-policy", "one-step-off", "streaming")]
        jobs = [job for ms in settings.reward_ms for job in two_jobs(kinds, ms, settings, progress)]
        weights = [pushed(mib, settings, progress) for mib in settings.sizes]
    return {
        "devices_apart": apart,
        "rows": modes,
        "jobs": jobs,
        "weights": weights,
        "figures": [
            *(
                {"name": f"{name}, {job['kind']}, rewards of {job['reward_ms']:g} ms", "unit": "x", **job[key]}
                for name, key in (("two jobs at once / one after the other", "ratio"), ("the most of cores", "most"))
                for job in jobs
            ),
            *({"name": f"weights of {w['mib']} MiB / raw socket", "unit": "x", **w["ratio"]} for w in weights),
            *(
                {"name": f"bytes through the controller, {w['mib']} MiB", "unit": "bytes", "median": w["through"]}
                for w in weights
            ),
        ],
    }


def one_mode(client: Worker, mode: str, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Milliseconds of a step of one job, and the duty of both islands."""
    import pathways_ray as pw

    progress.say(mode)
    client.ask("run", mode, WARM_STEPS)
    medians, busy = [], []
    for _ in range(settings.rounds):
        pw.utilization()
        found = client.ask("run", mode, settings.steps)
        busy.append(list(pw.utilization().values()))
        medians.append(1e3 * statistics.median(found["steps"]))
    sampler, learner = zip(*busy, strict=True)
    return {
        "mode": mode,
        "ms": measure.spread(medians),
        "sampler": measure.spread(sampler),
        "learner": measure.spread(learner),
    }


def two_jobs(
    kinds: dict[str, list[Worker]], reward_ms: float, settings: Settings, progress: Progress
) -> list[dict[str, Any]]:
    """Steps in a second of two jobs of each kind, one after the other and at once; and the most that the second can be
    of the first, by the processor time that a job takes alone.

    Raises:
        AssertionError: a job does not have the bits that it has alone.
    """
    found: dict[str, dict[str, list[float]]] = {kind: {"apart": [], "together": [], "most": []} for kind in kinds}
    for workers in kinds.values():
        ask_all(workers, "wait_for_rewards", reward_ms, limit_s=LIMIT_S)
        ask_all(workers, "run", "on-policy", WARM_STEPS, limit_s=LIMIT_S)
    for number in range(settings.rounds):
        for kind, workers in kinds.items():
            progress.say(f"two jobs, {kind}, rewards of {reward_ms:g} ms, round {number + 1}")
            before = cpu_seconds()
            alone = [worker.ask("run", "on-policy", settings.steps) for worker in workers]
            took = sum(one["ended"] - one["begun"] for one in alone)
            cpu = sum(one["cpu"] for one in alone) + (cpu_seconds() - before if kind == "tenants" else 0.0)
            both = ask_all(workers, "run", "on-policy", settings.steps, limit_s=LIMIT_S)
            at_once = max(one["ended"] for one in both) - min(one["begun"] for one in both)  # on one clock
            found[kind]["together"].append(2 * settings.steps / at_once)
            found[kind]["apart"].append(2 * settings.steps / took)
            found[kind]["most"].append(len(os.sched_getaffinity(0)) * took / cpu)
            same = [one["digest"] for one in both] == [one["digest"] for one in alone]
            assert same, "a job has other bits than alone"
    return [
        {
            "kind": kind,
            "reward_ms": reward_ms,
            **{name: measure.spread(values) for name, values in rates.items()},
            "ratio": measure.paired_ratios(rates["together"], rates["apart"]),
        }
        for kind, rates in found.items()
    ]


def cpu_seconds() -> float:
    """Processor time that the runtime's processes and this one have taken."""
    times = [process.cpu_times() for process in measure.runtime_processes().values()]
    return float(sum(one.user + one.system for one in times))


def pushed(mib: int, settings: Settings, progress: Progress) -> dict[str, Any]:
    """MiB in a second of weights and of a raw socket, and bytes of the controller for each push."""
    import jax
    from jax.sharding import PartitionSpec as P

    import pathways_ray as pw

    progress.say(f"weights of {mib} MiB")
    sampler, learner = (pw.virtual_slice((1,), (axis,), island=k) for k, axis in enumerate("xt"))
    tree = [np.full((mib * MIB // 16, 1), k, np.float32) for k in range(4)]
    change = pw.compiled(lambda leaves: [leaf + 1 for leaf in leaves], slice=learner, in_specs=P("t"), out_specs=P("t"))
    value = pw.put(tree, learner, P("t"))
    weights = pw.versioned(value, slice=sampler, spec=P(), max_lag=0)
    controller = measure.runtime_processes()["Controller 0"].pid
    rates: dict[str, list[float]] = {"weights": [], "raw": []}
    through = []
    with contextlib.closing(Raw(mib * MIB)) as raw:
        for _ in range(settings.rounds + 1):
            value = jax.block_until_ready(change(value))
            before, begun = tcp_bytes(controller), time.perf_counter()
            for _ in range(settings.pushes):
                weights.push(value)
                jax.block_until_ready(weights.latest().tree)
            took = time.perf_counter() - begun
            after = tcp_bytes(controller)
            time.sleep(took)
            through.append((2 * after - before - tcp_bytes(controller)) / settings.pushes)
            rates["weights"].append(settings.pushes * mib / took)
            rates["raw"].append(settings.pushes * mib / seconds(lambda: raw.receive(mib * MIB), settings.pushes))
    np.testing.assert_array_equal(np.asarray(weights.latest().tree[3]), np.asarray(value[3]))
    counted = {way: found[1:] for way, found in rates.items()}
    kinds = {way: measure.spread(found) for way, found in counted.items()}
    ratio = measure.paired_ratios(counted["weights"], counted["raw"])
    return {"mib": mib, **kinds, "ratio": ratio, "through": statistics.median(through[1:])}


def seconds(work: Callable[[], Any], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - begun


def tcp_bytes(process: int) -> int:
    """Bytes that a process has sent and received by TCP connections that are open, as the kernel counts them."""
    text = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines() if f"pid={process}," in line]
    return sum(int(n) for line in lines for n in re.findall(r"bytes_(?:acked|received):(\d+)", line))


show = shows(
    Table("one job, ms of a step, and the duty of each device", "rows", "mode", "ms:.0f", "sampler:.2f", "learner:.2f"),
    Table(
        "two jobs at once, steps a second, and the most that the cores allow",
        "jobs",
        *("kind", "reward_ms:g", "apart:.2f", "together:.2f", "ratio:.2f", "most:.2f"),
    ),
    Table(
        "weights to the other island, MiB a second, and bytes of the controller for each push",
        "weights",
        *("mib", "weights:.0f", "raw:.0f", "ratio:.2f", "through:.0f"),
    ),
)

BENCHMARK = Benchmark("rl", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
