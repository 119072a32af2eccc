"""Reading of the local sockets by the threads that wait: a small value reaches its thread without a change of threads.

One of the threads that wait leads: it reads the sockets of all hosts, for itself and for the others, until it has what
it waits for; then it wakes another one, which leads. The others sleep, each until its own answer has come: with many
threads, one that wakes all of them for each answer would be what they wait for. What ends a wait otherwise (a failure,
a deletion, an answer over a data stream) wakes the leader through a descriptor that it polls as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from pathways_ray.transport.busy_poll import BusyPoll
from pathways_ray.transport.local_sockets import MAX_ANSWER_BYTES

Take = Callable[[bytes], None]

_ROOM, _AT_ONCE = (MAX_ANSWER_BYTES,), (socket.MSG_DONTWAIT,)

SEVERAL = 2
"""Threads that wait beside the one that reads. From so many on it does not look again and again: some of them have just
been woken, and want the interpreter."""


class Sleeper:
    """A thread that waits for its answer while another one reads. Its lock is made when it sleeps: few have to."""

    _lock: threading.Lock | None = None
    _woken = False

    def wake(self) -> None:
        """Ends its sleep, or the next one. Any thread may call this, any number of times."""
        self._woken = True
        if self._lock is not None:  # looked at behind that: who is about to sleep looks the other way round
            try:  # noqa: SIM105  # a context would take longer than all of this
                self._lock.release()
            except RuntimeError:  # it is awake, and knows
                pass

    def sleep(self, limit_s: float) -> None:
        """Sleeps until it is woken, at most for `limit_s` seconds."""
        if self._lock is None:
            lock = threading.Lock()
            lock.acquire()
            self._lock = lock
        if not self._woken:
            self._lock.acquire(timeout=limit_s)
        self._woken = False  # one that comes right here has released the lock, and ends the next sleep


class LocalReader:
    """The local sockets of a session's hosts, of which at most one thread reads."""

    def __init__(self) -> None:
        self.leading = threading.RLock()  # a signal handler may wait in the midst of a wait of its thread
        self._leader = 0
        self._asleep = asleep = dict[Sleeper, None]()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)
        self._sockets: dict[int, tuple[socket.socket, Take]] = {}
        self._busy = BusyPoll(lambda: len(asleep) < SEVERAL)  # not `self`: its files are closed with the last use of it
        self._received: deque[tuple[socket.socket, Take, bytes]] = deque()

    def add(self, connection: socket.socket, take: Take) -> None:
        """Reads a socket from now on; `take` gets each batch that comes."""
        self._sockets[connection.fileno()] = connection, take
        self._poll.register(connection, select.EPOLLIN)
        self.wake()

    def remove(self, connection: socket.socket) -> None:
        """Reads it no more; before it is closed."""
        self._forget(connection.fileno())

    def _forget(self, number: int) -> None:
        if self._sockets.pop(number, None) is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(number)

    def _forget_closed(self) -> None:
        for number, (connection, _) in list(self._sockets.items()):
            if connection.fileno() < 0:  # closed by somebody, and polled no more
                self._forget(number)

    def wake(self) -> None:
        """Has the leader look at what it waits for."""
        if self._leader not in (0, threading.get_ident()):
            os.eventfd_write(self._wake, 1)

    def wake_all(self) -> None:
        """Has all threads look at what they wait for."""
        for sleeper in list(self._asleep):
            sleeper.wake()
        self.wake()

    def wait(self, is_over: Callable[[], object], sleeper: Sleeper, slice_s: float, until: float | None = None) -> None:
        """Waits until something is over; who ends it wakes `sleeper` and, with `wake`, the thread that reads.

        Args:
            slice_s: seconds after which it looks again, whether woken or not.
            until: the time of `time.monotonic` at which it waits no more.
        """
        over: object = False
        taken: list[bool] = []
        try:
            while not over:
                if until is not None and (is_over() or (slice_s := min(slice_s, until - time.monotonic())) <= 0):
                    return
                # Ctrl-C may come right behind a call that takes a lock, before anything has its result. So what is
                # `taken` is noted without a step in between; nor is there one between a look at that and the release.
                if True not in taken:
                    taken[:] = map(self.leading.acquire, (False,))
                if True in taken:
                    over = self.lead(is_over, slice_s)  # which looks before it reads
                else:  # no `continue` above: Ctrl-C at a jump to where `try` begins would come outside of it
                    self._asleep[sleeper] = None
                    # Looked at behind the entry: a leader that goes now finds it there.
                    if self._leader and not is_over():
                        sleeper.sleep(slice_s)
                    self._asleep.pop(sleeper, None)
                    over = is_over()
        finally:
            try:
                if True in taken:
                    self.leading.release()
                if self._asleep:
                    self._leave(sleeper)
            except BaseException:  # Ctrl-C: else nobody might lead, and the others sleep
                self._leave(sleeper)
                raise

    def _leave(self, sleeper: Sleeper) -> None:
        """Has another thread lead, unless one does: who is woken for nothing hands that on as well."""
        self._asleep.pop(sleeper, None)
        if self._asleep and not self._leader:
            with contextlib.suppress(KeyError):
                self._asleep.popitem()[0].wake()

    def lead(self, is_over: Callable[[], object], limit_s: float) -> bool:
        """Reads until something is over, or was woken, or `limit_s` seconds have passed in all, whatever else comes
        meanwhile; whether it is over. The caller has `leading`.

        Ctrl-C may end this at any step. What has been read is not lost: the next leader takes it first.
        """
        before, end = self._leader, 0.0
        try:
            self._leader = threading.get_ident()
            while True:
                if self._received:
                    self._take_received()
                if is_over():
                    return True
                now = time.perf_counter()
                end = end or now + limit_s
                if now >= end or not self._receive(now, end - now):
                    return False
        finally:
            self._leader = before

    def fileno(self) -> int:
        """The number of a file that a loop polls, which then calls `read`."""
        return self._poll.fileno()

    def read(self) -> None:
        """Reads what is there. The caller has `leading`."""
        before = self._leader
        try:
            self._leader = threading.get_ident()
            self._receive(0.0, 0.0)
            self._take_received()
        finally:
            self._leader = before

    def _receive(self, now: float, limit_s: float) -> bool:
        """Reads a batch of each socket that has one; False when nothing came before the limit, or a wake."""
        woken = False
        for number, _ in self._polled(now, limit_s) or ((-1, 0),):
            try:
                connection, take = self._sockets[number]
                came = map(connection.recv, _ROOM, _AT_ONCE)
                # This calls `recv` and notes what came without a step in between.
                self._received.extend(zip((connection,), (take,), came, strict=True))
            except KeyError:
                woken = True
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            except BlockingIOError:
                pass
            except OSError:
                if self._is_open(number):
                    raise  # a signal handler did
                self._forget(number)  # the host is gone, which its data stream tells
        return not woken or bool(self._received)  # looked at behind the sockets: what has come counts

    def _is_open(self, number: int) -> bool:
        connection, _ = self._sockets.get(number, (None, None))
        try:
            return connection is not None and bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _polled(self, now: float, limit_s: float) -> list[tuple[int, int]]:
        """The sockets that have something, once one has, or the limit has passed since `now`."""
        poll = self._poll.poll
        if not limit_s:
            return poll(0.0)
        busy = self._busy
        found: list[tuple[int, int]] = []
        if busy.begins(now):
            while not (found := poll(0.0)) and busy.goes_on(time.perf_counter()):
                os.sched_yield()
        if not found:
            self._forget_closed()
            found = poll(limit_s)
        busy.came(time.perf_counter())
        return found

    def _take_received(self) -> None:
        received = self._received
        while received:
            first = connection, take, data = received[0]
            if data:
                take(data)
            else:
                self.remove(connection)
            if received and received[0] is first:  # unless a signal handler has taken it meanwhile, too
                received.popleft()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._wake)  # a default: at the end of the interpreter `os` may be gone
