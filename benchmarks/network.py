"""Arrays in and out the way they go between two machines, in parts over streams, plain and encrypted.

Neither client nor hosts reach a local socket of another host, as from another machine, so no memory is shared. Each
round moves the same bytes by all ways in turn, over loopback: a raw TCP connection from another process, and where the
streams are encrypted a raw one with TLS; put, fetch, and from island to island (which JAX's transfer servers never
encrypt).

Run it with `python -m benchmarks run network --json network.json`; it takes about a minute and needs `openssl`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from benchmarks import measure
from benchmarks.bytes import MIB, Raw, Ways, rates
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows


@dataclass(frozen=True)
class Settings:
    mib: int = option(64, "of the array, in MiB")
    devices: tuple[int, ...] = option((1, 4), "of each slice")
    rounds: int = option(5, "that count, after one that does not")


SMOKE = Settings(1, (1,), rounds=1)


@contextlib.contextmanager
def certificate() -> Iterator[tuple[str, str]]:
    """The files of a certificate of this machine, and of its key."""
    with tempfile.TemporaryDirectory() as folder:
        made, key = str(Path(folder) / "cert.pem"), str(Path(folder) / "key.pem")
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=pathways"
        files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", made]
        subprocess.run([*command.split(), *files], check=True, capture_output=True)
        yield made, key


def no_local_socket(invitation: Any) -> NoReturn:
    """Takes the place of what opens a local socket, which on another machine finds none."""
    from pathways_ray.transport.local_sockets import NotLocal

    raise NotLocal(f"{invitation.name} is as if on another machine")


def moved(raws: dict[str, Raw], here: Any, there: Any, settings: Settings) -> dict[str, Any]:
    """MiB a second of each way, and their ratios to a raw connection."""
    ways = Ways(here, there, settings.mib)
    sockets = {name: partial(raw.receive, ways.array.nbytes) for name, raw in raws.items()}
    found = rates({**sockets, **ways.all()}, settings.mib, settings.rounds)
    ways.check()
    floor = list(raws)[-1]
    ratios = {f"{way}_ratio": measure.paired_ratios(found[way], found[floor]) for way in ("put", "fetch")}
    ratios["across_ratio"] = measure.paired_ratios(found["across"], found["raw"])
    return {**{way: measure.spread(one) for way, one in found.items()}, **ratios}


def run(settings: Settings, progress: Progress) -> Result:
    """Measures on a cluster for each kind of streams."""
    from pathways_ray.client import data_link

    rows: list[dict[str, Any]] = []
    path = os.pathsep.join([str(Path(__file__).with_name("machines_apart")), os.environ.get("PYTHONPATH", "")])
    with (
        mock.patch.dict(os.environ, PYTHONPATH=path),
        mock.patch.object(data_link, "LocalSocket", no_local_socket),
        certificate() as tls,
    ):
        for streams, options in {"plain": {}, "TLS": {"tls": tls}}.items():
            raws = {"raw": Raw(settings.mib * MIB)}
            if options:
                raws["raw_tls"] = Raw(settings.mib * MIB, tls)
            try:
                rows += on_cluster(streams, options, raws, settings, progress)
            finally:
                for raw in raws.values():
                    raw.close()
    return {"measured": " ".join(__doc__.split("\n\n")[1].split()), "rows": rows, "figures": figures(rows)}


def on_cluster(
    streams: str, options: dict[str, Any], raws: dict[str, Raw], settings: Settings, progress: Progress
) -> list[dict[str, Any]]:
    """The rows of one cluster."""
    import pathways_ray as pw

    rows = []
    with pw.init(islands=2, devices_per_host=max(settings.devices), **options):
        for devices in settings.devices:
            progress.say(f"{streams}, {devices} devices")
            with (
                pw.virtual_slice((devices,), ("x",), island=0) as here,
                pw.virtual_slice((devices,), ("x",), island=1) as there,
            ):
                found = moved(raws, here, there, settings)
            rows.append({"streams": streams, "devices": devices, "mib": settings.mib, **found})
    return rows


def figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios of each row."""
    return [
        {
            "name": f"{way}, {row['streams']}, {row['devices']} devices, of a raw socket",
            "unit": "x",
            **row[f"{way}_ratio"],
        }
        for row in rows
        for way in ("put", "fetch", "across")
    ]


show = shows(
    Table(
        "arrays in parts, MiB a second, and ÷ a raw socket of the same kind",
        "rows",
        *("streams", "devices", "mib", "raw:.0f", "raw_tls:.0f", "put:.0f", "put_ratio:.2f"),
        *("fetch:.0f", "fetch_ratio:.2f", "across:.0f", "across_ratio:.2f"),
    )
)

BENCHMARK = Benchmark("network", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
