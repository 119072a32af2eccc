"""`pw.Array`: a handle to a logical array on a slice, usable before the array is computed.

Handles are counted per buffer: all `Array`s that name one buffer share a `Buffer`, and the shards on the devices are
freed when the last of them is dropped or one of them is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import numpy as np

from pathways_ray.client import notebook
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.buffer import DELETED, LOSSES, PENDING, Buffer
from pathways_ray.client.callbacks import awaited, when_done
from pathways_ray.client.guards import made_again
from pathways_ray.client.numbers import seconds
from pathways_ray.client.slice_array import SliceArray
from pathways_ray.errors import BufferDeleted, UsageError, from_failure
from pathways_ray.observe.why import Why

T = TypeVar("T")


class Array(SliceArray):
    """A future array on a virtual slice.

        y = double(x)  # at once
        print(float(y[0]), (y + 1).sharding.spec)

    It is a `jax.Array`: operators, methods, `jnp.*`, `jax.jit` and `jax.grad` take it, and compute on its slice.
    `np.asarray(y)`, `float(y)` and `y.block_until_ready()` wait for it and raise what went wrong with it; everything
    else answers at once.
    """

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Buffer, kind: ArgumentType) -> None:
        self._buffer = buffer
        self._type = kind

    def is_ready(self) -> bool:
        """Whether a wait would return (or raise) at once.

            done = [y for y in results if y.is_ready()]

        Raises:
            BufferDeleted: the array was deleted or donated.
        """
        self._check_not_deleted()
        record = self._buffer.record
        if (waits := record.shown is PENDING) and record.early:
            self._buffer.session.hurry()
        return not waits

    def is_deleted(self) -> bool:
        """Whether the array was deleted, or donated to a launch that took its memory."""
        return self._buffer.record.state is DELETED

    def block_until_ready(self, timeout: float | None = None) -> Array:
        """Waits until the array is computed; returns itself.

            y = step(x).block_until_ready(timeout=60.0)

        Args:
            timeout: seconds; None waits as long as the launch may take, which the runtime bounds when processes die.

        Raises:
            PathwaysError: the root cause, when the launch that makes the array failed.
            WaitTimeout: it took longer than `timeout`.
        """
        self._wait(timeout, there=True)
        return self

    def _wait(self, timeout: float | None, there: bool = False) -> None:
        """Waits for the outcome of the launch that makes the array, or, with `there`, until its hosts have it, which is
        sooner: the launch may fail yet, by the loss of another host for one."""

        def wait() -> None:
            self._check_alive()
            try:
                self._buffer.session.wait(self._buffer.record, seconds(timeout), there)
            except KeyboardInterrupt as interrupt:
                self._offer_to_cancel(interrupt)
                raise

        self._looked_at(wait)

    def _looked_at(self, look: Callable[[], T]) -> T:
        """The result of a look at the array. One that was lost may be made again meanwhile (`elastic`)."""
        while True:
            try:
                return look()
            except LOSSES:
                if self._buffer.record.failure is None or not made_again(self._buffer):
                    raise

    def _offer_to_cancel(self, interrupt: KeyboardInterrupt) -> None:
        """Has Ctrl-C in a wait say what is left running."""
        interrupt.add_note(
            f"{self!r} is still being computed; y.cancel() cancels it with all that depends on it, and y.why() says "
            "what it waits for"
        )

    def add_done_callback(self, call: Callable[[Array], Any]) -> None:
        """Has `call` called with this array once it is computed or has failed; at once where it has.

            y.add_done_callback(lambda array: queue.put(array))

        A thread of the session calls one such function after the other, in the order in which arrays were done. It may
        launch; while it waits, those behind it do, too. What it raises is logged, a `SystemExit` too.

        Raises:
            BufferDeleted: the array was deleted or donated.
        """
        self._check_not_deleted()
        when_done(self, call)

    def __await__(self) -> Generator[Any, None, Array]:
        """Waits in a coroutine, without holding up its event loop; returns the array, or raises its failure."""
        self._check_not_deleted()
        return awaited(self)

    def cancel(self) -> bool:
        """Cancels the launch that makes the array, with all its other results.

            if not y.cancel():
                print("it had begun")

        A launch that waits, in this process, at the controller or in its island's scheduler, ends at once with
        `Cancelled`, and so does what depends on it. One that hosts have cannot be stopped: its results count as
        cancelled from now on, and are freed when it is over. So it is with one over several islands of which one has
        begun.

        Returns:
            Whether the launch had not begun. False too where there is nothing to cancel any more.

        Raises:
            BufferDeleted: the array was deleted or donated.
        """
        self._check_not_deleted()
        return self._buffer.session.cancel(self._buffer.record)

    def why(self) -> Why:
        """The reasons for which the array is not ready: the chain from it to what holds it, to be printed.

            print(y.why())

        Where it stands in this process's queue, at the controller, in its island's order, on its hosts; behind whose
        launch, upload, compilation or memory. For one that failed, the story until then. A tenant learns no names of
        others. It asks the controller once its launch has left, and takes some milliseconds.

        Raises:
            ControllerLost: the controller does not answer.
        """
        return self._buffer.session.why(self._buffer.record)

    def delete(self) -> None:
        """Frees the array on its devices now.

            y.delete()

        Any later use raises `BufferDeleted`.
        """
        self._buffer.delete("it was deleted")

    def _check_not_deleted(self) -> None:
        if self._buffer.record.undecided:
            self._buffer.session.settle(self._buffer.record)
        if self._buffer.record.state is DELETED:
            raise BufferDeleted(f"{self._type.array} cannot be used: {self._buffer.record.why_deleted}")

    def _check_alive(self) -> None:
        record = self._buffer.record
        if record.undecided or record.state is DELETED:
            self._check_not_deleted()
        if record.failure is not None:
            raise from_failure(record.failure)

    def __array__(self, dtype: Any = None, context: None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("the value of a pw.Array lies on devices; it cannot be had without a copy")
        if self._type.extended is not None:
            raise TypeError("typed PRNG keys have no NumPy value; take np.asarray(jax.random.key_data(keys))")

        value = self._looked_at(self._fetched)
        return value if dtype is None else value.astype(dtype, copy=False)

    def _fetched(self) -> np.ndarray[Any, Any]:
        self._check_alive()
        try:
            value: np.ndarray[Any, Any] = self._buffer.session.fetch(self)
            return value
        except KeyboardInterrupt as interrupt:
            self._offer_to_cancel(interrupt)
            raise

    __hash__ = object.__hash__

    def _alias(self) -> Array:
        """A further handle to the same array."""
        return Array(self._buffer, self._type)

    def __copy__(self) -> Any:
        """A copy on the slice, which lives on where this one is donated."""
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy on the slice."""
        return memo.setdefault(id(self), self.copy())

    def __reduce__(self) -> Any:
        raise UsageError(
            f"{self!r} is a handle of this session, which cannot be pickled; np.asarray(y) is its value, and "
            "Orbax saves trees of such arrays"
        )

    def __repr__(self) -> str:
        return f"pw.Array({self._type} @ {self._type.where()}, {self._buffer.record.shown.value})"

    def _repr_html_(self) -> str:
        """The array in a notebook: type, place, state, and which device has which tile. Its value is not fetched."""
        return notebook.array_html(self._type, self.nbytes, self._buffer.record.shown.value)
