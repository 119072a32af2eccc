"""`pw.versioned`: values that are copied to another slice again and again, such as weights from learner to sampler."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from pathways_ray.client.array import Array
from pathways_ray.client.buffer import DELETED, FAILED, PENDING
from pathways_ray.client.compiled import compiled
from pathways_ray.client.interrupted import check_not_mine, new_lock
from pathways_ray.client.numbers import whole
from pathways_ray.client.placement import reshard
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.versions import Act, Versions
from pathways_ray.errors import BufferDeleted, BufferLost, Failure, SessionClosed, UsageError

_NESTED = (
    "a signal handler or a destructor changes the pw.versioned that a call of its own thread is just changing, which "
    "would undo it. Set a flag there, and act on it behind the call"
)


GONE = {DELETED, FAILED}
"""States of arrays that nobody can take any more: they were deleted, donated or lost."""


class Version(NamedTuple):
    """A version of a tree, on the slice to which it was copied."""

    tree: Any
    version: int


class _Held(NamedTuple):
    """All that a `Versioned` knows: its versions, the copies of those that are there or under way, the one that waits,
    and what was pushed last. It is replaced as a whole, so that Ctrl-C finds either all of a step done, or nothing."""

    versions: Versions
    copies: dict[int, Any]
    kept: Any
    source: Any


class Versioned:
    """The result of `pw.versioned`. Any thread may use it."""

    def __init__(self, tree: Any, slice: VirtualSlice, spec: Any, max_lag: int | None) -> None:
        if not isinstance(slice, VirtualSlice):
            raise UsageError(f"slice= takes what pw.virtual_slice returns, not {slice!r}")
        if max_lag is not None and whole(max_lag, 0) is None:
            raise UsageError(f"max_lag= is a number of versions from 0 on, or None for any; not {max_lag!r}")
        self.slice, self.spec, self.max_lag = slice, spec, max_lag
        self._keep: dict[Any, Any] = {}
        self._held = _Held(Versions(), {}, None, None)
        self._lock = new_lock()
        self.push(tree)

    def push(self, tree: Any) -> int:
        """Copies another version of the tree, and returns its number at once.

            weights.push(update(w))

        While a copy is under way a version waits, as a copy of its own where it lies now, and the next one takes its
        place. So the arrays may be donated right after the call.

        Raises:
            UsageError: it is another tree than the first one, has other shapes or types, or a leaf is no `pw.Array`; or
                a signal handler pushes amid another call of its thread.
        """
        check_not_mine(self._lock, why=_NESTED)
        leaves, structure = _leaves(tree), jax.tree.structure(tree)
        with self._lock:
            source = self._held.source
            before: Any = jax.tree.structure(source)
            if source is not None and structure != before:
                raise UsageError("another tree than the first version: pw.versioned copies one tree again and again")
            for first, now in zip(jax.tree.leaves(source), leaves, strict=False):
                if first._type.array != now._type.array:
                    raise UsageError(
                        f"{now._type.array} in place of {first._type.array}, which the versions before have there: "
                        "pw.versioned copies one tree again and again"
                    )
            self._settle()
            versions, copies, kept, _ = self._begun()
            made = self._snapshot(tree) if versions.under_way else self._moved(tree)
            if versions.push() is Act.SEND:
                copies[versions.pushed] = made
            else:
                kept = made
            self._held = _Held(versions, copies, kept, jax.tree.unflatten(structure, leaves))
            return versions.pushed

    def latest(self) -> Version:
        """The newest version that has arrived, unless that is more than `max_lag` behind: then the oldest that is not,
        which is still to arrive. Launches may take it all the same, and wait for it. Never waits.

            answers = sample(weights.latest().tree, prompts)

        Raises:
            BufferLost: no version is left, since the slice has lost its hosts, or a launch was given its arrays to keep
                (`restore` copies the last one again), or since what was pushed has failed as well.
            SessionClosed: no version is left, since the session has ended.
        """
        with self._lock:
            self._settle()
            versions, copies, kept, source = self._begun()
            found = versions.take(self.max_lag)
            if found < 0:
                if closed := self.slice.session.closed_because:
                    raise SessionClosed(f"the session is closed, and with it all versions are gone: {closed}")
                if (why := _failure_of(source)) is not None:
                    raise BufferLost(
                        f"version {versions.pushed} has failed where it came from, and {self._behind()}: push "
                        f"another one. {why.kind}: {why.message}"
                    )
                raise BufferLost(
                    f"the version on {self.slice} was lost with its hosts, or deleted or donated, and no other is "
                    "under way: call restore(), or push another one"
                )
            if found == versions.waits:
                copies[versions.release()] = self._moved(kept)
                self._held = _held(versions, copies, None, source)
            taken = Version(copies[found], found)
        return taken

    def restore(self) -> Version:
        """Copies the version that was pushed last again, unless it is there or under way, and returns the latest. Of
        arrays that were donated to a launch that has failed it waits until it is known whether they live on.

            weights.restore()  # the sampler's hosts were lost

        Raises:
            BufferDeleted: its arrays are gone, such as by donation: push another version.
            UsageError: a signal handler restores amid another call of its thread.
        """
        check_not_mine(self._lock, why=_NESTED)
        for leaf in jax.tree.leaves(self._held.source):  # before the lock, so that nobody else waits
            leaf._buffer.session.settle(leaf._buffer.record)
        with self._lock:
            self._settle()
            versions, copies, kept, source = self._begun()
            if versions.again():
                copies[versions.pushed] = self._copied_again(source)
                self._held = _Held(versions, copies, kept, source)
            latest = self.latest()
        return latest

    @property
    def version(self) -> int:
        """The number of the newest version that has arrived; -1 for none. One that was too old for `max_lag` before it
        had arrived does not count."""
        with self._lock:
            self._settle()
            return self._held.versions.there

    @property
    def pushed(self) -> int:
        """The number of the version that was pushed last; the first one is 0."""
        return self._held.versions.pushed

    @property
    def lag(self) -> int:
        """Versions by which the newest that has arrived is behind the one that was pushed last."""
        with self._lock:
            self._settle()
            return self._held.versions.lag

    @property
    def skipped(self) -> int:
        """Versions that were never copied, since a newer one came first."""
        return self._held.versions.skipped

    def _behind(self) -> str:
        there = self._held.versions.there
        return (
            f"version {there}, which is there, is more than max_lag={self.max_lag} behind"
            if there >= 0
            else "no other is there"
        )

    def _copied_again(self, source: Any) -> Any:
        if GONE & _states(source):
            why = _failure_of(source)
            cause = f"have failed ({why.kind}: {why.message})" if why is not None else "are gone"
            raise BufferDeleted(
                f"version {self.pushed} cannot be copied again, since its arrays {cause}; push another one"
            )
        return self._moved(source)

    def _begun(self) -> _Held:
        """A copy of what it knows, to change and then put in its place."""
        versions, copies, kept, source = self._held
        return _Held(dataclasses.replace(versions, under_way=list(versions.under_way)), dict(copies), kept, source)

    def _moved(self, tree: Any) -> Any:
        """A copy of a tree on the slice, which is on its way."""
        moved = reshard(tree, self.slice, self.spec)
        leaves, structure = jax.tree.flatten(moved)
        here = [one._buffer is other._buffer for one, other in zip(leaves, jax.tree.leaves(tree), strict=True)]
        if any(here):  # what lies there already is handed back; a version is memory of its own
            kept = jax.tree.leaves(self._snapshot(tree))
            moved = jax.tree.unflatten(structure, [k if h else m for k, m, h in zip(kept, leaves, here, strict=True)])
        return moved

    def _snapshot(self, tree: Any) -> Any:
        """Copies of arrays where they lie: one launch for each slice that has some."""
        leaves, structure = jax.tree.flatten(tree)
        places = tuple((leaf._type.slice, leaf._type.spec) for leaf in leaves)
        made: list[Any] = [None] * len(leaves)
        for where in dict.fromkeys(place for place, _ in places):
            mine = [k for k, (place, _) in enumerate(places) if place is where]
            specs = [leaves[k].sharding.spec for k in mine]
            key = (where, tuple(specs))
            if key not in self._keep:
                self._keep[key] = compiled(_copied, slice=where, in_specs=(specs,), out_specs=specs)
            for k, one in zip(mine, self._keep[key]([leaves[k] for k in mine]), strict=True):
                made[k] = one
        return jax.tree.unflatten(structure, made)

    def _settle(self) -> None:
        """Notes what has arrived or failed, or was donated, since the last look."""
        versions, copies, kept, source = self._begun()
        if versions.there >= 0 and GONE & _states(copies[versions.there]):
            versions.lost()
        for version in list(versions.under_way):
            states = _states(copies[version])
            if PENDING in states and not GONE & states:
                continue
            made = self._moved(kept) if versions.waits >= 0 and len(versions.under_way) == 1 else None
            released = versions.failed(version) if GONE & states else versions.arrived(version)
            if released >= 0:
                copies[released], kept = made, None
        self._held = _held(versions, copies, kept, source)

    def __repr__(self) -> str:
        return f"pw.versioned({self.slice}, version {self._held.versions.there} of {self._held.versions.pushed})"


def _held(versions: Versions, copies: dict[int, Any], kept: Any, source: Any) -> _Held:
    """Puts together all that a `Versioned` knows, without copies that nobody gets any more."""
    used = {versions.there, *versions.under_way}
    return _Held(versions, {number: copy for number, copy in copies.items() if number in used}, kept, source)


def _copied(leaves: Any) -> Any:
    # A result that is an argument handed through would be the argument's own memory until the launch has ended.
    return [jax.numpy.copy(leaf) for leaf in leaves]


def _states(tree: Any) -> set[Any]:
    return {leaf._buffer.record.state for leaf in jax.tree.leaves(tree)}


def _failure_of(tree: Any) -> Failure | None:
    """The failure of the first array of a tree that has failed, or None."""
    records = [leaf._buffer.record for leaf in jax.tree.leaves(tree)]
    return next((one.failure for one in records if one.state is FAILED), None)


def _leaves(tree: Any) -> list[Array]:
    """The leaves of a tree. Raises `UsageError` where one is no array of a slice."""
    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        if not isinstance(leaf, Array):
            raise UsageError(f"pw.versioned copies pw.Arrays from slice to slice, not {type(leaf).__name__}: pw.put it")
    if not leaves:
        raise UsageError("pw.versioned copies a tree of pw.Arrays; this one has none")
    return leaves


def versioned(tree: Any, *, slice: VirtualSlice, spec: Any = None, max_lag: int | None = None) -> Versioned:
    """Copies of a tree on another slice, made again at every push: weights on their way from a learner to a sampler.

        weights = pw.versioned(params, slice=sampler, spec=P(), max_lag=1)
        tokens = sample(weights.latest().tree, prompts)
        weights.push(params)

    A push is one launch, whatever the number of leaves, and returns at once; values go from device to device. One copy
    is under way at a time, and the latest version wins: those in between are not sent.

    Args:
        tree: `pw.Array`s, the first version.
        slice: the slice that gets copies.
        spec: a `PartitionSpec` for them there, or a pytree prefix; None is replicated.
        max_lag: versions by which `latest` may be behind what was pushed last. 0 is on-policy; None, any.

    Raises:
        UsageError: a leaf is no `pw.Array`, or an option of the wrong kind.
    """
    return Versioned(tree, slice, spec, max_lag)
