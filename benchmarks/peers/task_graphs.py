"""The task graphs of Task Bench (Slaughter et al., SC'20) that METG is measured on, for all systems alike.

A graph has rows (time steps) of WIDTH tasks, one for each worker. A task takes the values of some tasks of the row
before, works for a number of iterations, and returns one value:

    value(t, p) = (1 + p + sum over k of (k + 1) * input k) mod MODULUS

so that one edge too many, too few, or in the wrong place shows in the last row. All of it is exact in float32. The row
before the first holds START everywhere. Patterns are Task Bench's: `trivial`, `no_comm`, `stencil_1d`, `tree`, `fft`,
`spread` with radix 3. Of the tree the first rows are left out, which are narrower than the others.
"""

import math

WIDTH = 4
START = 1.0
MODULUS = 1021
RADIX = 3  # of `spread`: as many inputs as `stencil` has, but from far away
PERIOD = math.ceil(WIDTH / RADIX)  # of `spread`: the most that keeps its inputs apart
PATTERNS = ("trivial", "no_comm", "stencil", "tree", "fft", "spread")
STEPS = 64  # rows of a graph that is described to a system at once; a multiple of every period

KERNEL = 64
"""Elements on which a task works: an iteration is x <- x * x + x for each, two operations, as in Task Bench."""

KERNEL_START = -0.5
"""Values between -1 and 0 stay there and never become denormal, so every iteration takes the same time."""


def period(pattern: str) -> int:
    """Rows after which the edges repeat."""
    return {"fft": math.ceil(math.log2(WIDTH)), "spread": PERIOD}.get(pattern, 1)


def dependencies(pattern: str, row: int, point: int) -> list[int]:
    """The tasks of the row before whose values a task takes, in order."""
    which = row % period(pattern)
    if pattern == "trivial":
        return []
    if pattern == "no_comm":
        found = [point]
    elif pattern == "stencil":
        found = [point - 1, point, point + 1]
    elif pattern == "tree":
        found = [point // 2]
    elif pattern == "fft":
        reach = 1 << (which + period(pattern) - 1) % period(pattern)
        found = [point - reach, point, point + reach]
    elif pattern == "spread":
        found = [(point + i * WIDTH // RADIX + (which if i else 0)) % WIDTH for i in range(RADIX)]
    else:
        raise ValueError(f"no pattern {pattern!r}; there are {', '.join(PATTERNS)}")
    return [p for p in found if 0 <= p < WIDTH]


def value(point: int, inputs: list[float]) -> float:
    """The value of a task."""
    return (1 + point + sum((k + 1) * each for k, each in enumerate(inputs))) % MODULUS


def last_row(pattern: str, rows: int) -> list[float]:
    """The values of the last row, which every system must find."""
    values = [START] * WIDTH
    for row in range(rows):
        values = [value(p, [values[q] for q in dependencies(pattern, row, p)]) for p in range(WIDTH)]
    return values
