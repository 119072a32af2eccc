"""A training that survives losses: chooses the islands to go on with, and the state to go on from.

A step that was lost ends the stretch of training that it belongs to; the next stretch begins from here. In this order:
wait until the islands are back or known to be lost, choose sizes (`fitting`), and take the state from the newest
snapshot (`kept`) or checkpoint, whichever is of the later step, else from the beginning. Where sizes and islands are
the same, slices and programs stay, and a snapshot comes from device to device; otherwise it comes through this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pathways_ray as pw
from megatron_ptdp.errors import BadSizes, CheckpointError, TooManyRestarts, TrainingStopped
from megatron_ptdp.parallel.replicas import for_all_groups, of_first_group
from megatron_ptdp.train.checkpoints import Checkpoints, Restored
from megatron_ptdp.train.config import Config
from megatron_ptdp.train.fitting import Fit, There, after_loss, fitting, islands_there, larger
from megatron_ptdp.train.kept import Kept, Taken
from megatron_ptdp.train.records import note_recovery
from megatron_ptdp.train.setup import Training
from pathways_ray.errors import (
    BufferLost,
    ControllerLost,
    HostLost,
    LaunchTimeout,
    PathwaysError,
    QuotaExceeded,
    SessionClosed,
    Unschedulable,
)

CONTROL_PLANE_LOST = (ControllerLost, SessionClosed)
LOST = (HostLost, BufferLost, LaunchTimeout, *CONTROL_PLANE_LOST)
"""Losses after which the cluster is there again, and the state is not."""

NO_ROOM = (Unschedulable, QuotaExceeded, BadSizes)
"""Refusals of slices that were to be had a moment before: an island has gone since, or others have the devices."""

BACK_LIMIT_S = 120.0
"""The time in which what was lost must come back, beyond that after which the cluster takes an island for lost."""

LOOK_S = 0.2
"""Time between two looks at islands that are waited for."""

GROW_LOOK_S = 1.0
"""Time between two looks for islands that have come, while there are fewer replicas than configured."""

GROW_AGAIN_S = 60.0
"""Time until more replicas are tried again, once they were refused: the state goes to this process and back for it."""

MAX_REFUSALS = 5
"""Refusals in a row of the slices of a training, each time of what fits the islands by then."""

MAX_IN_VAIN = 5
"""Losses in a row without a step between them that was not there before: the steps themselves seem to end hosts."""


@dataclass
class Start:
    """The beginning of a stretch of training: the state after `done` steps."""

    done: int
    state: Any


@dataclass(frozen=True)
class Recovery:
    """A line of `recoveries.jsonl`.

    Attributes:
        cause: the error, or "islands have come"
        reached: the last step whose loss had been seen
        step: the step after which training goes on
        source: of the state: "snapshot", "checkpoint", "beginning" or "devices"
        data, devices: replicas and devices from then on
    """

    cause: str
    reached: int
    step: int
    source: str
    data: int
    devices: int


class Survivor:
    """The training of a run as it is now, and what becomes of it when something is lost or has come.

    Args:
        session: of the cluster
        max_restarts: restarts from checkpoints, where no snapshots are taken
        say: shows a line
    """

    def __init__(
        self,
        config: Config,
        session: Any,
        checkpoints: Checkpoints,
        directory: Path,
        max_restarts: int,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.session, self.checkpoints, self.directory = config, session, checkpoints, directory
        self.max_restarts, self.say = max_restarts, say
        self.kept = Kept(config.run.snapshot_every)
        self.fit = Fit.of(config)
        self.training: Training
        self._is_built = False
        self._next: Fit | None = None
        self._looked_at = 0.0
        self._losses = self._in_vain = 0
        self._furthest = self._furthest_before = 0
        self._open: tuple[Recovery, float] | None = None
        self._had_place = True

    def begin(self, restored: Restored | None) -> Start:
        """Builds the training, with fewer replicas where `min_data` allows it and islands are missing.

        Raises:
            BadSizes, ConfigError: it does not fit the cluster.
            TooManyRestarts, TrainingStopped, PathwaysError: something was lost meanwhile, as in `recovered`.
        """
        while True:
            try:
                return self._begun(restored)
            except LOST as error:
                lost = error.with_traceback(None)
            if self._is_built:
                return self.recovered(lost)
            self._count(lost)
            if isinstance(lost, CONTROL_PLANE_LOST) and self.session.closed_because:
                self._reconnect()
            time.sleep(LOOK_S * 2**self._in_vain)

    def _begun(self, restored: Restored | None) -> Start:
        if self.config.parallel.min_data:
            up = {one.island: one.devices for one in self._there() if one.state == "up"}
            self.fit = fitting(self.config, up) or self.fit
        self.training = _built(self.fit)
        self._is_built = True
        done = restored.about.step if restored else 0
        self._furthest = done
        return Start(done, self._placed(restored))

    # --- for the loop -------------------------------------------------------------------------------------------------

    def before(self, state: Any, done: int) -> None:
        """The next step is about to be launched: takes a snapshot of its state if it is time."""

        def take() -> Taken:
            taken = pw.snapshot(of_first_group(state), local=True)
            self._had_place = True
            return Taken(done, taken, self.training)

        try:
            self.kept.look(done, take)
        except (Unschedulable, QuotaExceeded) as error:
            if self._had_place:
                self.say(f"no snapshots for now: {error}")
            self._had_place = False

    def landed(self, number: int) -> None:
        """The loss of a step was seen."""
        self.kept.landed = number
        self._furthest = max(self._furthest, number)
        if self._open is not None:
            recovery, began = self._open
            self._open = None
            note_recovery(self.directory, {**asdict(recovery), "seconds": time.monotonic() - began})

    def pauses(self) -> bool:
        """Whether the stretch is to end here, since islands have come: `grown` has the next one."""
        now = time.monotonic()
        if self.fit.sizes.data >= self.config.parallel.data or now - self._looked_at < GROW_LOOK_S:
            return False
        self._looked_at = now
        self._next = larger(self.config, self.fit, self._there())
        return self._next is not None

    # --- the next stretch ---------------------------------------------------------------------------------------------

    def grown(self, end: Start) -> Start:
        """Goes on with more replicas from the state on the devices; with as many as before where these are refused.

        Raises:
            TrainingStopped, PathwaysError: nothing that fits can be had any more.
        """
        began, fit, cause = time.monotonic(), self._next, "islands have come"
        assert fit is not None
        whole = self.training.step.gather(end.state)
        end.state = None
        self.training.release()
        try:
            self.training, self.fit = _built(fit), fit
        except NO_ROOM as error:
            cause = f"{type(error).__name__}: {error}"
            self._looked_at = time.monotonic() + GROW_AGAIN_S
            self._rebuild(self.fit)
        self._goes_on(cause, end.done, "devices", began)
        self.kept.begin(end.done)
        return Start(end.done, self.training.step.place(whole))

    def recovered(self, error: PathwaysError) -> Start:
        """Goes on after a loss.

        Raises:
            TooManyRestarts, TrainingStopped, PathwaysError: it cannot; with the last loss.
        """
        began = time.monotonic()
        while True:
            self._count(error)
            try:
                self.checkpoints.settle()
                if isinstance(error, CONTROL_PLANE_LOST) and self.session.closed_because:
                    self._reconnect()
                start, source = self._start(self._fit_now())
            except LOST as again:
                error = again
                time.sleep(LOOK_S * 2**self._in_vain)  # what is lost may not be known to be down yet
                continue
            self._goes_on(f"{type(error).__name__}: {error}", start.done, source, began)
            self.kept.begin(start.done)
            return start

    def _start(self, fit: Fit) -> tuple[Start, str]:
        """The next stretch with these sizes, and where its state is from."""
        taken = self.kept.newest()
        restored = self._restored(taken)
        stays = taken is not None and fit is self.fit and not self.training.released
        if stays:
            self.training.step.renew()  # they were lost as well
        if taken is None or restored is not None:
            if not stays:
                self._rebuild(fit)
            done, source = (restored.about.step, "checkpoint") if restored else (0, "beginning")
            return Start(done, self._placed(restored)), source
        if stays and taken.training is self.training:
            return Start(taken.done, for_all_groups(self.training.step, taken.snapshot.restore())), "snapshot"
        whole = taken.training.step.gather(taken.snapshot.values())
        self._rebuild(fit)
        return Start(taken.done, self.training.step.place(whole)), "snapshot"

    def _restored(self, taken: Taken | None) -> Restored | None:
        """The newest checkpoint; beside a snapshot, only one of a later step, whose loss was seen."""
        if taken is None:
            return self.checkpoints.latest()
        try:
            return self.checkpoints.latest(taken.done, self.kept.landed)
        except CheckpointError:  # those are damaged, and the snapshot is not
            return None

    def _placed(self, restored: Restored | None) -> Any:
        """The state of a checkpoint, or that before the first step."""
        if restored is None:
            return self.training.first_state()
        state = self.training.step.place(restored.state)
        restored.state.clear()  # as large as the model's whole state; after a restart it is read again
        return state

    def _rebuild(self, fit: Fit) -> None:
        """Gives the slices back and takes others; where they are refused, since an island has gone meanwhile, those of
        what fits by then.

        Raises:
            TrainingStopped: nothing fits within the limit.
            Unschedulable, QuotaExceeded, BadSizes: they were refused several times.
        """
        self.training.release()
        for refusals in range(1, MAX_REFUSALS + 1):
            try:
                self.training, self.fit = _built(fit), fit
                return
            except NO_ROOM as error:
                if refusals == MAX_REFUSALS:
                    raise
                self.say(f"slices were refused, others are asked for: {error}")
            time.sleep(LOOK_S * 2**refusals)  # what has gone may not be known yet
            fit = self._fit_now(self.fit.config)

    # --- what is there ------------------------------------------------------------------------------------------------

    def _there(self) -> list[There]:
        return islands_there(self.session.status())

    def _fit_now(self, most: Config | None = None) -> Fit:
        """Waits until the islands are such that training can go on; returns its sizes.

        Args:
            most: has the most replicas that are taken; left out, the configured ones.

        Raises:
            TrainingStopped: they are not within the limit.
        """
        limit = BACK_LIMIT_S + self.config.cluster.lost_after
        deadline = time.monotonic() + limit
        while True:
            there = self._there()
            fit = after_loss(most or self.config, self.fit, self.training.used, there)
            if fit is self.fit and self.training.released:  # slices may have moved: the islands of then may be gone
                fit = fitting(fit.config, {one.island: one.devices for one in there if one.state == "up"}) or fit
            if fit is not None:
                return fit
            if time.monotonic() > deadline:
                seen = ", ".join(f"island {one.island} is {one.state}, {one.devices} devices" for one in there)
                least = self.config.parallel.min_data or self.config.parallel.data
                raise TrainingStopped(
                    f"what was lost did not come back within {limit:.0f} s, and nothing from {least} replicas up fits "
                    f"what is there: {seen}; look at `pathways status`, add islands, or lower min_data"
                )
            time.sleep(LOOK_S)

    def _reconnect(self) -> None:
        """Opens a session of the controller that has come back; what the one before held is gone.

        Raises:
            TrainingStopped: it did not come back within the limit.
        """
        asked, own = self.config.cluster, getattr(self.session, "cluster", None)
        url, token, ca = (own.url, own.token, own.ca) if own is not None else (asked.url, asked.token, asked.ca)
        deadline = time.monotonic() + BACK_LIMIT_S
        self.kept.taken.clear()
        if self._is_built:
            self.training.release()
        while True:
            try:
                self.session = pw.connect(url, token, name="pathways-train", ca=ca or None)
                return
            except ControllerLost as error:
                if time.monotonic() > deadline:
                    raise TrainingStopped(f"the controller did not come back in {BACK_LIMIT_S:.0f} s") from error
            time.sleep(LOOK_S)

    # --- what is counted and said -------------------------------------------------------------------------------------

    def _count(self, error: PathwaysError) -> None:
        """Counts a loss.

        Raises:
            TooManyRestarts, PathwaysError: it is one too many.
        """
        self._losses += 1
        self._in_vain = self._in_vain + 1 if self._furthest == self._furthest_before else 1
        self._furthest_before = self._furthest
        if self.config.run.snapshot_every:
            if self._in_vain <= MAX_IN_VAIN:
                return
            raise TooManyRestarts(
                f"hosts were lost {self._in_vain} times after step {self._furthest} without a further step; the last "
                f"time: {error}"
            )
        if self._losses <= self.max_restarts:
            return
        if self.max_restarts:
            raise TooManyRestarts(
                f"hosts were lost {self._losses} times, --max-restarts is {self.max_restarts}; the last time: {error}"
            )
        # `SessionClosed` is a mistake of the user's elsewhere; here the control plane went, and the session with it.
        kind = TrainingStopped if isinstance(error, SessionClosed) else type(error)
        raise kind(
            f"{error}; run again to go on from the last checkpoint, --max-restarts N does so by itself, and "
            "snapshot_every=10 goes on from snapshots"
        ) from error

    def _goes_on(self, cause: str, step: int, source: str, began: float) -> None:
        sizes = self.fit.sizes
        self._open = Recovery(cause, self._furthest, step, source, sizes.data, sizes.devices), began
        how = f"restart {self._losses} of {self.max_restarts}" if not self.config.run.snapshot_every else "goes on"
        self.say(
            f"{cause}; {how} from step {step} ({source}) with {sizes.data} replicas on {sizes.devices} devices, after "
            f"{time.monotonic() - began:.1f} s"
        )


def _built(fit: Fit) -> Training:
    return Training.of(fit.config, fit.schedule, fit.sizes, fit.islands)
