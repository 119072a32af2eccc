"""Checkpoints: the whole state in one canonical form, written by Orbax while training goes on.

A checkpoint is a folder `<step>` with two parts: `state`, all arrays by name; and `about`, JSON with the sizes of its
model and the CRC-32 of each array. Orbax marks it as whole when all of it is there, and looks at no
other. What lies in it does not depend on (p, t, d, v), nor on how the state was cut.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import orbax.checkpoint as ocp

from megatron_ptdp.errors import CheckpointError, TrainingStopped
from megatron_ptdp.models.config import ModelConfig
from pathways_ray.errors import PathwaysError

FORMAT = 1
_PARTIAL = ".orbax-checkpoint-tmp"
"""Part of the names of folders that Orbax has not finished."""

_ASIDE = ".replaced-by-"
"""In the names of folders of checkpoints that are about to be replaced; behind it is the step of the one that does."""

SLOW_S = 60.0
"""The time after which training says that it waits for a checkpoint that is being written."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The description that a checkpoint has of itself.

    Attributes:
        step: steps that are done; also the position in the data
        model: its sizes
        data: of which file and in which order, see `Checkpoints.save`
        crc32: of the bytes of each array
        form: version of all this
    """

    step: int
    model: ModelConfig
    data: dict[str, int]
    crc32: dict[str, int]
    form: int = FORMAT


State: TypeAlias = Callable[[], Mapping[str, Any] | None]


class Restored(NamedTuple):
    about: About
    state: dict[str, Any]


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays of a nested dict, by the names on the way to each, joined with dots."""
    flat: dict[str, np.ndarray] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = np.asarray(value)
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flattened`; dicts that were empty are not there."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *way, last = name.split(".")
        at = tree
        for one in way:
            at = at.setdefault(one, {})
        at[last] = value
    return tree


def check_sum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


class Checkpoints:
    """The checkpoints of a run; a context manager that waits for the last one.

    Args:
        folder: made when the first one is written.
        keep: how many stay; older ones go when a new one is whole.
        warn: called with a text where checkpoints were passed over, or take long to write.

    Raises:
        CheckpointError: something else than a folder is there.
    """

    def __init__(self, folder: Path, model: ModelConfig, keep: int, warn: Callable[[str], None]) -> None:
        self.folder, self.model, self.warn = folder.absolute(), model, warn
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is to have the checkpoints, and is a file: move it away")
        _put_back(self.folder)
        self._unfinished = sorted(self.folder.glob(f"*{_PARTIAL}*"))
        for path in self._unfinished:
            shutil.rmtree(path)  # Orbax would do it in a thread that is not waited for
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown(wait=True)
        with contextlib.suppress(Exception):  # it raises again what `_write` has said in a word
            self._manager.close()

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are whole, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: State, data: dict[str, int]) -> None:
        """Writes a checkpoint in the background, after the one before.

        Args:
            step: steps that are done
            state: gives the arrays, or None to have nothing written; called in another thread
            data: what the order of the data depends on: the CRC-32 of the file, its seed, and examples of a step

        Raises:
            The error of the checkpoint before; TrainingStopped where it cannot be written, as on a full disk.
        """
        self.wait()
        self._writing = self._writer.submit(self._write, step, state, data)

    def _write(self, step: int, state: State, data: dict[str, int]) -> None:
        tree = state()
        if tree is None:
            return
        arrays = flattened(tree)
        sums = {name: check_sum(array) for name, array in arrays.items()}
        about = About(step=step, model=self.model, data=data, crc32=sums)
        parts = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), about=ocp.args.JsonSave(msgspec.to_builtins(about))
        )
        try:
            # Passed over: they are damaged, or a loss before them was not seen. They may be all that there is.
            later = [there for there in self.steps() if there >= step]
            for there in later:  # that of the same step first: while it is there, it is the one that is whole
                (self.folder / str(there)).rename(self.folder / f"{there}{_ASIDE}{step}")
            if later:
                self._manager.reload()
            self._manager.save(step, args=parts, force=True)
            self._manager.wait_until_finished()
        except Exception as error:  # what a full disk makes of Orbax and TensorStore
            raise TrainingStopped(f"checkpoint {step} in {self.folder} cannot be written: {error}") from error
        finally:
            if _put_back(self.folder):
                self._manager.reload()

    def wait(self) -> None:
        """Waits until what `save` was given is on disk, however slow the disk is.

        Raises:
            The error of writing it.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if wait([writing], SLOW_S).not_done:
            self.warn(f"training waits for a checkpoint, which is not in {self.folder} after {SLOW_S:.0f} s yet")
        writing.result()

    def settle(self) -> None:
        """Waits like `wait`, and ignores errors: the state was lost with its host."""
        with contextlib.suppress(PathwaysError):
            self.wait()

    def latest(self, after: int = -1, until: int = sys.maxsize) -> Restored | None:
        """The newest checkpoint that is whole, of the steps after one and until another; None without any.

        Raises:
            CheckpointError: it is of another model; or there are some, and all are damaged.
        """
        steps = [step for step in self.steps() if after < step <= until]
        damaged = [
            f"checkpoint {path.name.partition('.')[0]} in {self.folder} was not written to its end"
            for path in self._unfinished
        ]
        for step in reversed(steps):
            try:
                found = self.read(step)
            except CheckpointError as error:
                if isinstance(error, OfAnotherModel):
                    raise
                damaged.append(str(error))
                continue
            if damaged:
                self.warn(f"{'; '.join(damaged)}; going on from step {step}")
            return found
        if steps:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(damaged)}; "
                "remove the folder to train from the beginning"
            )
        if damaged and after < 0:
            self.warn(f"{'; '.join(damaged)}; there is no other, so training begins at step 0")
        return None

    def read(self, step: int) -> Restored:
        """One checkpoint, all of it checked.

        Raises:
            CheckpointError: it is damaged. OfAnotherModel: it does not fit the model.
        """
        try:
            read = self._part(step, about=ocp.args.JsonRestore())
            about = msgspec.convert(read, About)
            if unknown := _names(read) - _names(msgspec.to_builtins(about)):
                raise ValueError(f"it says something about {', '.join(sorted(unknown))}, which is not known")
            if about.form != FORMAT or about.step != step:
                raise ValueError(f"it says step {about.step}, format {about.form}")
        except Exception as error:  # what a damaged file makes of Orbax, TensorStore or msgspec
            raise self._damaged(step, error) from error
        _require_same(about.model, self.model, f"checkpoint {step} in {self.folder}")
        arrays = {}
        try:
            for name, expected in about.crc32.items():
                arrays[name] = self._array(step, name)
                if check_sum(arrays[name]) != expected:
                    raise ValueError(f"{name} is not what was written")
        except Exception as error:
            raise self._damaged(step, error) from error
        return Restored(about, nested(arrays))

    def _part(self, step: int, **part: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**part))[next(iter(part))]

    def _array(self, step: int, name: str) -> np.ndarray:
        """One of a checkpoint. Read one by one: when a read fails beside others, these end in a closed event loop."""
        numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        part = ocp.args.PyTreeRestore(item={name: 0}, restore_args=numpy, partial_restore=True)
        return np.asarray(self._part(step, state=part)[name])

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        first = " ".join(str(error).split())[:300]
        return CheckpointError(f"checkpoint {step} in {self.folder} is damaged: {first or type(error).__name__}")


def _put_back(folder: Path) -> bool:
    """Removes the checkpoints that were put aside for one that is whole by now, or puts them back where it is not;
    returns whether there are such. It may be killed meanwhile: that of the same step comes back last."""
    back = False
    for path in sorted(folder.glob(f"[0-9]*{_ASIDE}*"), key=lambda path: -int(path.name.partition(_ASIDE)[0])):
        name, _, step = path.name.partition(_ASIDE)
        if (folder / step).exists():
            shutil.rmtree(path)
        else:
            path.rename(folder / name)
            back = True
    return back


def _names(found: Any) -> set[str]:
    """The names of all fields in what a file says, those inside of others too."""
    if not isinstance(found, dict):
        return set()
    return set(found).union(*(_names(value) for value in found.values()))


class OfAnotherModel(CheckpointError):
    """A checkpoint whose model has other sizes."""


def _require_same(there: ModelConfig, here: ModelConfig, what: str) -> None:
    """Raises `OfAnotherModel` with what differs."""
    sizes = [(field.name, getattr(there, field.name), getattr(here, field.name)) for field in fields(here)]
    differ = [f"{name} is {theirs} there and {ours} here" for name, theirs, ours in sizes if theirs != ours]
    if differ:
        raise OfAnotherModel(
            f"{what} is of another model: {', '.join(differ)}; set the model to that of the checkpoint, or choose "
            "another directory"
        )
