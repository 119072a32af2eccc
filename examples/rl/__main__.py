"""Runs the example on a cluster of its own: `python -m examples.rl --mode on-policy --steps 200 --compare`."""

import argparse
import os
import statistics

import jax

import pathways_ray as pw
from examples.rl import loops

MEMBERS = 2

THREADS = "8"
"""Threads of XLA on CPU on a host of two devices. The sums of its matrix products depend on them."""


def main() -> None:
    """Learner and sampler on two devices of an island each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=loops.MODES, default="on-policy")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compare", action="store_true", help="the same in plain JAX, bit by bit")
    options = parser.parse_args()
    if options.compare and options.mode == "streaming":
        parser.error("--compare is for the other modes: what streaming computes depends on when weights arrive")
    os.environ["NPROC"] = THREADS
    jax.config.update("jax_num_cpu_devices", 2 * MEMBERS)

    def show(number: int, step: loops.Step) -> None:
        if number % 10 == 0 or number == options.steps - 1:
            figures = f"reward {step.reward:.3f}, right {step.right:.2f}, loss {step.loss:+.4f}, lag {step.lag}"
            print(f"step {number}: {figures}, {step.seconds * 1e3:.0f} ms", flush=True)

    with pw.init(islands=2, devices_per_host=MEMBERS):
        sampler = pw.virtual_slice((MEMBERS,), ("x",), island=0)
        learner = pw.virtual_slice((MEMBERS,), ("t",), island=1)
        job = loops.Job(sampler, learner)
        pw.utilization()
        found = loops.run(job, options.mode, options.steps, show)
        busy = ", ".join(f"island {island} {share:.2f}" for island, share in pw.utilization().items())
    times = [step.seconds for step in found.steps[min(5, options.steps - 1) :]]
    print(f"{options.mode}: median step {statistics.median(times) * 1e3:.0f} ms; busy: {busy}")
    if options.compare:
        reference = loops.plain(options.steps, MEMBERS, lag=int(options.mode != "on-policy"))
        same = loops.same_bits(found, reference)
        times = [step.seconds for step in reference.steps[min(5, options.steps - 1) :]]
        print(f"plain JAX: median step {statistics.median(times) * 1e3:.0f} ms; bit-equal: {same}")


if __name__ == "__main__":
    main()
