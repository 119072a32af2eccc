"""Settings of a run, drawn from its seed, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from pathways_ray.simulation.policies import POLICIES

COALESCED_LENGTHS = (16, 8, 4)
"""Lengths of coalesced launches: shorter than in use, so that short loops have some."""

WAITED_S = 0.5
"""A launch whose outcome comes so long after the last drop of a handle waited for somebody. What was freed behind it
goes with the end of it."""

EAGER_LAUNCHES = 16
"""Launches under way up to which an eager client hands over the next one."""


@dataclass(frozen=True)
class Settings:
    """The cluster of a run, its clients and the number of its faults.

    `cancels` is the chance that a user cancels an array that is to come. `starved_s` are seconds in which all processes
    of the runtime get little time on crowded cores. `outages` are moments in which all machines lose their power, one
    of them for good, `manager_deaths` those in which the resource manager alone ends, `scheduler_deaths` those in which
    a scheduler does, `controller_deaths` the controller. `torn` is the chance that a scheduler dies before what it
    sends to its hosts has come to all of them, `deaths` that a process dies within moments of a
    step of a move, a suspension, a snapshot or a change of islands. `changes` are islands that are added or drained,
    `moves` the chance that a user moves a slice, `suspends` that it suspends its session, `snapshots` that it takes
    one, `preempts` that at a tick the controller has a session give way to another, `memory` the bytes of each device,
    0 for more than is ever needed. `rings` says that the devices of each island are linked to a ring, `divergent` is
    the chance that a program has collectives that one of its hosts does not enter, `calls` that hosts run a function
    beside their devices, `routes` that a program routes rows, `priorities` that a launch has a priority. With `eager`
    , launches begin early wherever they may. `waits` is the chance that a loop looks at each value, `inline` that a
    value goes with its launch. `slow` is the factor of the times of devices. `replaces` is the chance that a user drops
    a program for another one, `serves` that it calls one for its values alone. With `keeps`
    donated arguments keep their memory until the launch is over, as small ones do.

    Windows are mostly far smaller than in production, so that runs reach their limits.
    """

    islands: dict[int, list[int]]
    devices: int
    clients: int
    parallel: bool
    fusion: bool
    policy: str
    window: int
    cross_island_window: int
    max_in_flight: int
    slices: int
    programs: int
    launches: tuple[int, int]
    poison: float
    loops: float
    impatient: float
    faults: int
    apart: float = 0.0
    lost_after_s: float = 40.0
    flaws: float = 0.0
    launch_limit_s: float = 10.0
    compile_limit_s: float = 8.0
    hostile: int = 0
    starved_s: float = 0.0
    cancels: float = 0.0
    outages: int = 0
    manager_deaths: int = 0
    scheduler_deaths: int = 0
    controller_deaths: int = 0
    torn: float = 0.0
    deaths: float = 0.0
    divergent: float = 0.0
    decisions: float = 0.0
    changes: int = 0
    moves: float = 0.0
    suspends: float = 0.0
    snapshots: float = 0.0
    preempts: float = 0.0
    memory: int = 0
    calls: float = 0.0
    routes: float = 0.0
    rings: bool = False
    priorities: float = 0.0
    eager: bool = False
    waits: float = 0.0
    inline: float = 0.0
    slow: float = 1.0
    replaces: float = 0.0
    serves: float = 0.0
    keeps: bool = False

    @classmethod
    def drawn(cls, seed: int, faults: int, policy: str) -> Settings:
        """Settings of a seed.

        Args:
            policy: one of `POLICIES`, or "" to draw it too.
        """
        random = Random(f"settings {seed}")
        hosts, islands = 0, {}
        for island in range(random.choice([1, 2, 2, 3, 4])):
            count = random.choice([1, 1, 2, 2, 3])
            islands[island] = list(range(hosts, hosts + count))
            hosts += count
        window = random.choice([2, 4, 16, 128])
        looping = random.random() < 0.1
        chosen = random.choice(sorted(POLICIES))
        divergent = Random(f"divergent {seed}").choice([0.0, 0.0, 0.0, 0.0, 0.3])
        return cls(
            islands=islands,
            devices=random.choice([1, 2, 2]),
            clients=random.choice([1, 2, 3, 4]),
            parallel=random.random() < 0.8,
            fusion=random.random() < 0.7,
            policy=policy or chosen,
            window=window,
            cross_island_window=max(1, window // 2),
            max_in_flight=random.choice([3, 8, 1024]),
            slices=random.choice([1, 2, 3]),
            programs=random.choice([1, 2, 3]),
            launches=(5, 30),
            poison=random.choice([0.0, 0.0, 0.2]),
            loops=1.0 if looping else random.choice([0.0, 0.0, 0.5]),
            impatient=random.choice([0.0, 0.3]),
            faults=faults,
            flaws=Random(f"flaws {seed}").choice([0.0, 0.0, 0.0, 0.0, 0.3]),
            decisions=Random(f"decisions {seed}").choice([0.0, 0.0, 0.6]),
            hostile=int(random.random() < 0.2),
            divergent=divergent,
            calls=Random(f"calls {seed}").choice([0.0, 0.0, 0.4]),
            routes=Random(f"routes {seed}").choice([0.0, 0.0, 0.4]),
            moves=Random(f"moves {seed}").choice([0.0, 0.0, 0.0, 0.3]),
            suspends=Random(f"suspends {seed}").choice([0.0, 0.0, 0.0, 0.2]),
            preempts=Random(f"preempts {seed}").choice([0.0, 0.0, 0.0, 0.3]),
            changes=Random(f"changes {seed}").choice([0, 0, 0, 0, 4]),
            rings=Random(f"rings {seed}").choice([False, True]),
            priorities=Random(f"priorities {seed}").choice([0.0, 0.0, 0.3]),
            eager=Random(f"eager {seed}").choice([False, True]),
            waits=Random(f"waits {seed}").choice([0.0, 0.0, 0.7]),
            serves=Random(f"serves {seed}").choice([0.0, 0.0, 0.5]),
            keeps=Random(f"keeps {seed}").choice([False, True]),
            inline=Random(f"carried {seed}").choice([0.0, 0.0, 0.7]),
            outages=int(faults > 0 and Random(f"outages {seed}").random() < 0.1),
        )

    def priority(self, random: Random) -> int:
        """The priority of a launch; nothing is drawn where none has one."""
        return random.choice([-2, 1, 5, 50]) if self.priorities and random.random() < self.priorities else 0


@dataclass
class Result:
    """The violations and the counts of a run. `digest` is that of its log; two runs of one seed have the same."""

    seed: int
    violations: list[str]
    digest: str
    launches: int = 0
    failed: int = 0
    values: int = 0
    struck: int = 0
    events: int = 0
    seconds: float = 0.0
    log: list[str] = field(default_factory=list)
