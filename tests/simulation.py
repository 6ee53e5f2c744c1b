"""The three state machines in bad weather: real cores, a simulated network, clock and processes, all from one seed.

What runs is what production runs: `gateway.ledger.Ledger`, `scheduler.state.Scheduler`, `worker.process.state.Worker`.
Around each stands what its loop does (socket, timers, pidfds, signals), in a few lines that follow gateway/client.py,
scheduler/server.py and worker/process/server.py; the device is an oracle whose every row is known.

    client ─▶ GatewayProcess ─ Dealer ═ Connection ═ SchedulerProcess ═ Connection ═ Dealer ─ WorkerProcess

The network does what ZeroMQ was seen to do (common/wire/transport.py), at the worst moment: a message takes a random
time and overtakes none of its own connection; some arrive twice; a connection that breaks takes along what is on its
way, and its two ends learn of it at different times; an end that comes back under a routing id that the other still
holds for alive is swallowed; a message to a peer may fail while its last words still wait to be read, and then counts
as its loss at once, or after these are heard. Processes crash, are stopped and go on, hang, drain, are restarted.
Faults end after some seconds; then all must come to rest by itself.

Checked at every turn of the scheduler or of a worker, at every dispatch, and at the end:

- a request ends once, with the right bits, or with a failure that the weather explains; one whose deadline is far away
  never ends by it;
- nothing is dispatched after its deadline, and what has lost nothing goes out in the order of arrival in its lane, of
  each tenant;
- a worker holds between 0 and 2 batches, as it sees it and as the scheduler does;
- of each request that the scheduler has, every unanswered sequence waits, runs or is held back exactly once;
- no idle worker that is ready stands beside work that waits;
- a worker is killed only for a fault of its own or of its connection;
- when all is quiet nobody holds anything, everybody is joined, and a request is answered.

    python -m tests.simulation --runs 100000 --processes 2    # seeds 0 …; the seeds that fail are printed
    python -m tests.simulation --seed 4711                    # that one, with its log of events
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import heapq
import itertools
import logging
import multiprocessing
import random
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.errors import EX_BUSY, EX_STUCK, DeadlineExceeded, ServiceError
from common.lanes import LANES
from common.metrics import Metrics
from common.wire.codec import Message, decode, encode
from common.wire.messages import Batch, BatchFailed, Goodbye, Hello, Join, Refuse, Result, cu_seqlens
from common.wire.rows import ENCODINGS
from gateway.ledger import Ledger
from gateway.open_request import OpenRequest, Options
from scheduler.actions import Action, Kill, ToGateway
from scheduler.batching import MAX_LOSSES, Part
from scheduler.fleet import SUSPECT_NS
from scheduler.server import _LEAST_SLEEP_NS
from scheduler.state import Scheduler
from tests.fakes import DIMENSIONS, FACTS, oracle_result, oracle_row
from worker.process.state import Worker

US = 1_000
MS = 1_000_000
SECOND = 1_000 * MS

POISON = 29_999  # a token that kills the worker that runs it
NOT_FINITE = 29_998  # a token of which the model makes a NaN
VOCABULARY = 29_000  # the others

RECONNECT_NS = 2 * SECOND  # how long a gateway's silent scheduler keeps it from coming back under another name
FAR_S = 400.0  # a deadline that no weather explains
REST_S = 200  # by then all is quiet
STUCK_S = 60  # a worker whose Python hangs is ended by its alarm


class Violation(AssertionError):
    """What must never happen has."""


@dataclass(frozen=True)
class Cores:
    """The state machines that run; a test plants a bug by a subclass of one."""

    ledger: type[Ledger] = Ledger
    scheduler: type[Scheduler] = Scheduler
    worker: type[Worker] = Worker


@dataclass(frozen=True)
class Plan:
    """How much happens in a run. Counts are drawn between the two numbers."""

    num_gateways: int = 2
    num_workers: int = 2
    num_requests: tuple[int, int] = (3, 9)
    num_faults: tuple[int, int] = (1, 5)
    seconds: float = 3.0  # in which they come
    most_sequences: int = 4
    most_tokens: int = 24
    odd_steps: float = 0.02  # share of steps that raise, and as much again that answer nonsense or hang
    through_bytes: bool = False  # each message is encoded and decoded


SHORT = Plan()
LONG = Plan(
    num_workers=3,
    num_requests=(150, 150),
    num_faults=(10, 20),
    seconds=15.0,
    most_sequences=12,
    most_tokens=40,
    through_bytes=True,
)


# --- processes ---


class Process:
    """Something with a pid and a loop that has turns."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.pid = next(world.pids)
        self.alive = True
        self.stopped = False  # SIGSTOP: nothing of it goes on
        self.hung = False  # its Python; its sockets go on
        self.due_ns: int | None = None

    def __str__(self) -> str:
        return f"{self.name}({self.pid})"

    def wake(self, delay_ns: int = 0) -> None:
        """Have it take a turn by then."""
        due_ns = self.world.now_ns + delay_ns
        if self.alive and (self.due_ns is None or due_ns < self.due_ns):
            self.due_ns = due_ns
            self.world.at(due_ns, functools.partial(self._take_turn, due_ns))

    def _take_turn(self, due_ns: int) -> None:
        if self.alive and self.due_ns == due_ns and not self.stopped and not self.hung:
            self.due_ns = None
            self.turn()

    def turn(self) -> None:
        raise NotImplementedError

    def die(self) -> None:
        """Gone, without a word."""
        self.alive = False
        self.world.note("%s ends", self)

    def stop(self, seconds: float) -> None:
        if self.alive and not self.stopped:
            self.stopped = True
            self.world.note("%s is stopped for %.2f s", self, seconds)
            self.world.num_worker_losses += len(self.world.workers)  # of a scheduler all connections may break
            self.world.after(int(seconds * SECOND), self.go_on)

    def go_on(self) -> None:
        self.stopped = False
        if self.alive:
            self.world.note("%s goes on", self)
            self.due_ns = None
            self.wake()


class SchedulerProcess(Process):
    """The loop of scheduler/server.py around the core. Its two sockets are `inboxes` and `peers`."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "scheduler")
        self.core = world.cores.scheduler(
            epoch=self.pid,
            workers_total=world.plan.num_workers,
            max_queue_ms=60_000,
            metrics=world.metrics,
            now_ns=world.now_ns,
        )
        self.peers: dict[bytes, Connection] = {}
        self.inboxes: dict[str, deque[tuple[bytes, Message]]] = {"w": deque(), "g": deque()}
        self.pidfds: dict[bytes, Process] = {}
        self.exited: dict[str, list[bytes]] = {"w": [], "g": []}
        self.gone: dict[str, list[bytes]] = {"w": [], "g": []}  # a turn before they count as lost
        # Whether who is gone is first heard out.
        self.hears_out = world.rng.random() < 0.5

    def turn(self) -> None:
        self._turn("w")
        self._perform(self.core.form_batches(self.world.now_ns))
        self._turn("g")
        self._perform(self.core.on_tick(self.world.now_ns))
        self.world.check_scheduler(self.core)
        due_ns = max(_LEAST_SLEEP_NS, self.core.next_tick_ns() - self.world.now_ns)
        self.wake(0 if self.gone["w"] or self.gone["g"] else due_ns)

    def _turn(self, side: str) -> None:
        now_ns = self.world.now_ns
        on_message = self.core.on_worker_message if side == "w" else self.core.on_gateway_message
        on_lost = self.core.on_worker_lost if side == "w" else self.core.on_gateway_lost
        exited, self.exited[side] = self.exited[side], []
        gone, self.gone[side] = self.gone[side], []
        introductions = []
        for peer, message in self._take_inbox(side):
            if isinstance(message, Hello | Join):
                introductions.append((peer, message))
            else:
                self._perform(on_message(peer, message, now_ns))
        for peer in exited:
            self.pidfds.pop(peer, None)
            self._perform(on_lost(peer, "exited", now_ns))
        for peer in gone:
            self._perform(on_lost(peer, "disconnected", now_ns))
        for peer, message in introductions:
            process = self.world.processes.get(message.pid)
            if process is not None and process.alive:
                self.pidfds.setdefault(peer, process)
            self._perform(on_message(peer, message, now_ns))

    def _take_inbox(self, side: str) -> list[tuple[bytes, Message]]:
        """What has arrived: in order of each peer, and of these in any."""
        inbox, self.inboxes[side] = self.inboxes[side], deque()
        turns = [peer for peer, _ in inbox]
        self.world.rng.shuffle(turns)
        by_peer: dict[bytes, deque[Message]] = {}
        for peer, message in inbox:
            by_peer.setdefault(peer, deque()).append(message)
        return [(peer, by_peer[peer].popleft()) for peer in turns]

    def go_on(self) -> None:
        """Connections that were waited for may be there at once, before its first turn."""
        super().go_on()
        rng = self.world.rng
        self.due_ns = None
        self.wake(rng.randrange(5 * MS))
        for process in (*self.world.gateways.values(), *self.world.workers.values()):
            dealer = process.dealer
            if process.alive and dealer is not None and dealer.connection is None and rng.random() < 0.5:
                self.world.after(rng.randrange(5 * MS), functools.partial(dealer.connect, dealer.peer))

    def _perform(self, actions: list[Action]) -> None:
        self.world.check_dispatches(self.core, actions)
        lost: dict[bytes, None] = {}
        for action in actions:
            if isinstance(action, Kill):
                if (process := self.pidfds.get(action.peer)) is not None:
                    self.world.on_kill(process)
                continue
            connection = self.peers.get(action.peer)
            if connection is not None:
                connection.send_down(action.message)
                if isinstance(action.message, Refuse):
                    self.pidfds.pop(action.peer, None)
                continue
            self.core.on_undelivered(action.peer, action.message)
            side = "g" if isinstance(action, ToGateway) else "w"
            if not self.hears_out:
                lost[action.peer] = None
            elif action.peer not in self.gone[side]:
                self.gone[side].append(action.peer)
        for peer in lost:
            on_lost = self.core.on_worker_lost if peer[:1] == b"w" else self.core.on_gateway_lost
            self._perform(on_lost(peer, "disconnected", self.world.now_ns))

    def on_exit(self, process: Process) -> None:
        for peer, watched in self.pidfds.items():
            if watched is process:
                self.exited[peer[:1].decode()].append(peer)
                self.wake(self.world.rng.randrange(MS))


class GatewayProcess(Process):
    """What `SchedulerClient` does around the ledger."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.inbox: deque[Message] = deque()
        self.dealer = Dealer(world, self, "g")
        self.ledger = world.cores.ledger(name, self._send, world.metrics, world.now_ns)
        self.open: list[Sent] = []
        self._next_tick_ns = world.now_ns
        self._next_reconnect_ns = 0
        self.wake()

    def _send(self, message: Message) -> bool:
        if isinstance(message, Join):
            message = dataclasses.replace(message, pid=self.pid)
        return self.dealer.send(message)

    def turn(self) -> None:
        now_ns = self.world.now_ns
        self._receive()
        for sent in self.open:
            if sent.gives_up_ns <= now_ns and not sent.entry.future.done():
                if sent.cancels:
                    sent.entry.future.cancel()
                else:
                    sent.entry.fail(DeadlineExceeded("late"))
        self._close_done()
        if now_ns >= self._next_tick_ns:
            if self.ledger.silent(now_ns) and now_ns >= self._next_reconnect_ns:
                self._next_reconnect_ns = now_ns + RECONNECT_NS
                self.dealer.reconnect()
            self._next_tick_ns = now_ns + int(self.ledger.on_tick(now_ns) * SECOND)
            self.ledger.flush()
        next_ns = min([self._next_tick_ns, *(sent.gives_up_ns for sent in self.open)])
        self.wake(max(0, next_ns - now_ns))

    def submit(self, sent: Sent) -> None:
        """A client's request arrives."""
        if not self.alive or self.stopped:
            sent.note_end("not connected")
            return
        if self.ledger.silent(self.world.now_ns):
            self._receive()
        try:
            self.ledger.open(sent.entry, self.world.now_ns)
        except ServiceError as error:
            sent.note_end(error.code)
            return
        self.open.append(sent)
        self.wake()

    def leave(self) -> None:
        """A planned end, at once: what is held fails."""
        self.ledger.abandon()
        self._close_done()
        self.dealer.send(Goodbye("the gateway was told to stop"))
        self.dealer.close(linger=True)
        self.die()

    def die(self) -> None:
        super().die()
        self.dealer.close()
        for sent in self.open:
            sent.note_end("cut")
        self.open.clear()

    def _receive(self) -> None:
        self.ledger.flush()
        while self.inbox:
            self.ledger.on_message(self.inbox.popleft(), self.world.now_ns)
            self.ledger.flush()

    def _close_done(self) -> None:
        done = [sent for sent in self.open if sent.entry.future.done()]
        if done:
            self.open = [sent for sent in self.open if not sent.entry.future.done()]
            for sent in done:
                self.ledger.close(sent.entry)
                self.world.check_outcome(sent)


class WorkerProcess(Process):
    """The loop of worker/process/server.py around the core, and a device that runs one batch after the other."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.inbox: deque[Message] = deque()
        self.outcomes: list[Result | BatchFailed] = []
        self.signals = 0
        self.excused_until_ns = 0  # a fault of its own, or of its connection, explains its end
        self.dealer: Dealer | None = None
        self.queue: deque[Batch] = deque()
        self.running: Batch | None = None
        self._began_ns = 0
        self.core = world.cores.worker(name, self.pid, self, lambda: None, world.metrics, drain_timeout_s=5)
        world.after(world.rng.randrange(50 * MS, 800 * MS), self._load)

    def turn(self) -> None:
        now_s = self.world.now_ns / SECOND
        outcomes, self.outcomes = self.outcomes, []
        for outcome in outcomes:
            self.core.on_outcome(outcome, now_s)
        while self.inbox:
            self.core.on_message(self.inbox.popleft(), now_s)
        while self.signals:
            self.signals -= 1
            self.core.on_signal(now_s)
        self.core.on_tick(now_s)
        self.core.is_step_long(self._began_ns / SECOND if self.running is not None else None, now_s)
        if not 0 <= self.core.num_held <= 2:
            raise Violation(f"{self} holds {self.core.num_held} batches")
        if self.core.status is not None:
            self._exit(self.core.status)
        elif (next_s := self.core.next_tick_s(now_s)) is not None:
            self.wake(max(0, int((next_s - now_s) * SECOND)) + US)

    def excuse(self, duration_ns: int) -> None:
        self.excused_until_ns = max(self.excused_until_ns, self.world.now_ns + duration_ns)

    def signal(self) -> None:
        """SIGTERM."""
        self.world.note("%s is told to stop", self)
        self.signals += 1
        self.wake()

    def _load(self) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.world.after(100 * MS, self._load)
            return
        self.dealer = Dealer(self.world, self, "w")
        self.core.on_ready(FACTS, self.dealer)
        self.wake()

    def _exit(self, status: int) -> None:
        self.world.note("%s exits with status %d", self, status)
        if status not in {0, EX_STUCK, EX_BUSY}:
            raise Violation(f"{self} exits with status {status}")
        if self.dealer is not None:
            self.dealer.close(linger=True)
        self.die()

    def die(self) -> None:
        self.world.num_worker_losses += 1
        self.world.has_died = True
        super().die()
        if self.dealer is not None:
            self.dealer.close()
        world, name = self.world, self.name
        if (scheduler := world.scheduler) is not None:
            world.after(world.rng.randrange(3 * MS), functools.partial(scheduler.on_exit, self))
        world.after(world.rng.randrange(SECOND), lambda: world.start_worker(name))

    # --- the device ---

    def submit(self, batch: Batch) -> None:
        self.queue.append(batch)
        if self.running is None:
            self._begin()

    def drop_queued(self) -> None:
        self.queue.clear()

    def _begin(self) -> None:
        rng = self.world.rng
        self.running = self.queue.popleft()
        self._began_ns = self.world.now_ns
        odd = rng.random() if self.world.faulty else 1.0
        if odd < 0.1 * self.world.plan.odd_steps:
            self.world.note("%s: a step hangs", self)
            self.world.has_hung = True
            self.excuse(300 * SECOND)
            return
        most_ns = 60 * MS if rng.random() < 0.9 else 1500 * MS
        self.world.after(rng.randrange(MS, most_ns), functools.partial(self._finish, odd))

    def _finish(self, odd: float) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.world.after(50 * MS, functools.partial(self._finish, odd))
            return
        batch, self.running = self.running, None
        assert batch is not None
        if POISON in batch.token_ids:
            self.world.note("%s is poisoned", self)
            self.die()
            return
        if odd < self.world.plan.odd_steps:
            self.world.num_failed_steps += 1
            self.outcomes.append(BatchFailed(batch.epoch, batch.batch_id, "raised"))
        elif odd < 1.1 * self.world.plan.odd_steps:
            self.world.note("%s answers with a row too few", self)
            self.excuse(300 * SECOND)
            result = oracle_result(batch)
            self.outcomes.append(dataclasses.replace(result, rows=result.rows[:-1]))
        else:
            self.outcomes.append(result_of(batch))
        if self.queue:
            self._begin()
        self.wake()


# --- the network ---


class Dealer:
    """A gateway's or worker's socket."""

    def __init__(self, world: World, process: GatewayProcess | WorkerProcess, role: str) -> None:
        self.world = world
        self.process = process
        self._role = role
        self._closed = False
        self.connection: Connection | None = None
        self._begin()

    def send(self, message: Message) -> bool:
        if self.connection is None:
            return False
        self.connection.send_up(message)
        return True

    def reconnect(self) -> None:
        self.world.note("%s reconnects", self.process)
        self.process.inbox.clear()
        self._leave(linger=False)
        self._begin()

    def close(self, *, linger: bool = False) -> None:
        if not self._closed:
            self._closed = True
            self._leave(linger=linger)

    def on_broken(self, connection: Connection) -> None:
        """This end learns that its connection is gone, and tries again under its old name."""
        if self.connection is connection:
            self.connection = None
            self.world.after(self.world.rng.randrange(25 * MS, 250 * MS), functools.partial(self.connect, self.peer))

    def _begin(self) -> None:
        self.peer = f"{self._role}{next(self.world.numbers)}".encode()
        self.world.after(self.world.rng.randrange(2 * MS), functools.partial(self.connect, self.peer))

    def _leave(self, *, linger: bool) -> None:
        if self.connection is not None:
            self.connection.leave(linger=linger)
            self.connection = None

    def connect(self, peer: bytes) -> None:
        """Try to, under this name if it is still the one."""
        if self._closed or peer != self.peer or self.connection is not None:
            return
        scheduler = self.world.scheduler
        if scheduler is None or scheduler.stopped or self.process.stopped:
            self.world.after(self.world.rng.randrange(25 * MS, 250 * MS), functools.partial(self.connect, peer))
            return
        self.connection = Connection(self.world, self, scheduler)
        self.process.wake()


class Connection:
    """Between a dealer and a scheduler that lives; each end learns by itself that it has broken."""

    def __init__(self, world: World, dealer: Dealer, scheduler: SchedulerProcess) -> None:
        self.world = world
        self.dealer = dealer
        self.peer = dealer.peer
        self.scheduler = scheduler
        self._up_free_ns = self._down_free_ns = 0
        self._up = itertools.count()
        self._down = itertools.count()
        self._num_up = self._num_down = 0
        self._up_end: int | None = None  # the messages that still arrive of one that has broken
        self._down_end: int | None = None
        # The other end still holds a connection of this name for alive: all of this one is swallowed.
        self._swallowed = self.peer in scheduler.peers
        if self._swallowed:
            world.note("%s is swallowed", dealer.process)
            self._up_end = self._down_end = 0
            if isinstance(dealer.process, WorkerProcess):
                dealer.process.excuse(8 * SECOND)
        else:
            scheduler.peers[self.peer] = self

    def send_up(self, message: Message) -> None:
        self._num_up += 1
        self._up_free_ns = self._send(
            message, self._up_free_ns, functools.partial(self._arrive_up, self._num_up), self.dealer.process
        )

    def send_down(self, message: Message) -> None:
        self._num_down += 1
        self._down_free_ns = self._send(
            message, self._down_free_ns, functools.partial(self._arrive_down, self._num_down), self.scheduler
        )

    def _send(self, message: Message, free_ns: int, arrive: Callable[[Message], None], sender: Process) -> int:
        world, rng = self.world, self.world.rng
        if world.trace is not None:
            world.note("%s sends %s over %s", sender, short(message), self.peer.decode())
        draw = rng.random()
        delay_ns = int(draw * 500 * US) if draw < 0.95 else int(draw * 60 * MS)
        arrival_ns = max(world.now_ns + delay_ns, free_ns + 1)
        if world.plan.through_bytes:
            message = decode([bytes(frame) for frame in encode(message)])
        world.at(arrival_ns, functools.partial(arrive, message))
        if world.faulty and draw < 0.01:  # twice
            arrival_ns += 1
            world.at(arrival_ns, functools.partial(arrive, message))
        return arrival_ns

    def _arrive_up(self, number: int, message: Message) -> None:
        if self.scheduler.alive and (self._up_end is None or number <= self._up_end):
            side = self.peer[:1].decode()
            self.scheduler.inboxes[side].append((self.peer, message))
            self.scheduler.wake(self.world.rng.randrange(100 * US))

    def _arrive_down(self, number: int, message: Message) -> None:
        process = self.dealer.process
        if self.dealer.connection is self and (self._down_end is None or number <= self._down_end):
            process.inbox.append(message)
            process.wake(self.world.rng.randrange(100 * US))

    def leave(self, *, linger: bool) -> None:
        """The dealer's end is closed. What it sent last arrives where it lingers, and perhaps else."""
        rng = self.world.rng
        if self._up_end is None and not linger:
            self._up_end = rng.randint(max(0, self._num_up - 3), self._num_up)
        delay_ns = rng.randrange(2 * MS)
        if linger and rng.random() < 0.8:
            delay_ns += max(0, self._up_free_ns - self.world.now_ns)
        self.world.after(delay_ns, self.learn_above)

    def break_off(self, below_ns: int, above_ns: int) -> None:
        """Broken while both live: the ends learn of it after so long."""
        rng = self.world.rng
        if self._up_end is None:
            self._up_end = rng.randint(max(0, self._num_up - 3), self._num_up)
            self._down_end = rng.randint(max(0, self._num_down - 3), self._num_down)
        self.world.after(below_ns, functools.partial(self.dealer.on_broken, self))
        self.world.after(above_ns, self.learn_above)

    def learn_above(self) -> None:
        """The scheduler's end learns that it is gone; what has arrived can still be read."""
        if self.scheduler.stopped:
            self.world.after(self.world.rng.randrange(50 * MS), self.learn_above)
        elif self.scheduler.peers.get(self.peer) is self:
            del self.scheduler.peers[self.peer]
            if self._up_end is None:
                self._up_end = self._num_up


# --- clients ---


@dataclass(eq=False)
class Sent:
    """A request, what was asked, and how it ended."""

    number: int
    entry: OpenRequest
    sequences: list[npt.NDArray[np.int32]]
    spans: list[npt.NDArray[np.int32]] | None
    type_starts: list[int] | None
    gives_up_ns: int
    cancels: bool
    is_far: bool  # its deadline
    end: str | None = None  # answered, cancelled, cut, not connected, or the code of an error

    def note_end(self, end: str) -> None:
        if self.end is not None:
            raise Violation(f"request {self.number} ends twice: {self.end}, {end}")
        self.end = end

    def expected(self) -> list[bytes]:
        return [
            oracle_row(
                sequence,
                self.entry.options.encoding,
                type_start=None if self.type_starts is None else self.type_starts[index],
                span=span,
            ).tobytes()
            for index, sequence in enumerate(self.sequences)
            for span in ([None] if self.spans is None else map(tuple, self.spans[index].tolist()))
        ]


# --- all of it ---


class World:
    def __init__(
        self, seed: int, metrics: Metrics, plan: Plan = SHORT, cores: Cores = Cores(), *, trace: bool = False
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.metrics = metrics
        self.plan = plan
        self.cores = cores
        self.trace: list[str] | None = [] if trace else None
        self.now_ns = SECOND
        self.num_events = 0
        self.faulty = True
        self.has_hung = False
        self.has_died = False  # a worker
        self.num_worker_losses = 0
        self.num_failed_steps = 0
        self.pids = itertools.count(1)
        self.numbers = itertools.count(1)
        self.processes: dict[int, Process] = {}
        self.scheduler: SchedulerProcess | None = None
        self.gateways: dict[str, GatewayProcess] = {}
        self.workers: dict[str, WorkerProcess] = {}
        self.sent: list[Sent] = []
        self._deadlines_ns: dict[bytes, int] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.start_scheduler()
        for number in range(plan.num_gateways):
            self.start_gateway(f"gateway-{number}")
        for number in range(plan.num_workers):
            self.start_worker(f"worker-{number}")

    def note(self, text: str, *arguments: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_ns / SECOND:10.6f}  {text % arguments}")

    # --- time ---

    def at(self, time_ns: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_ns, next(self._order), event))

    def after(self, delay_ns: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_ns + delay_ns, next(self._order), event))

    def run(self, seconds: float) -> None:
        end_ns = self.now_ns + int(seconds * SECOND)
        events = self._events
        while events and events[0][0] <= end_ns:
            self.now_ns, _, event = heapq.heappop(events)
            self.num_events += 1
            event()
        self.now_ns = end_ns

    def play(self) -> None:
        """A whole run: weather, calm, rest. Raises Violation, or whatever a core raises."""
        plan, rng = self.plan, self.rng
        self.run(rng.uniform(0.2, 1.2))
        for number in range(rng.randint(*plan.num_requests)):
            at_s = rng.uniform(0, plan.seconds)
            # Half of them at the same moment as others, so that these leave their gateway together.
            self.after(int((round(2 * at_s) / 2 if number % 2 else at_s) * SECOND), self.send_request)
        for _ in range(rng.randint(*plan.num_faults)):
            self.after(int(rng.uniform(0, plan.seconds) * SECOND), self.strike)
        self.run(plan.seconds)
        self.faulty = False
        self.rest()
        probes = [self.send_request(plain=True) for _ in range(plan.num_gateways * 2)]
        self.rest()
        for probe in probes:
            if probe.end != "answered":
                raise Violation(f"in calm weather request {probe.number} ends with {probe.end}")
        self.check_empty()

    def rest(self) -> None:
        """Until all is quiet."""
        end_ns = self.now_ns + REST_S * SECOND
        while (busy := self.busy()) is not None:
            if self.now_ns > end_ns:
                raise Violation(f"no rest: {busy}")
            self.run(0.25)

    # --- processes ---

    def start_scheduler(self) -> None:
        self.scheduler = scheduler = SchedulerProcess(self)
        self.note("%s starts", scheduler)
        scheduler.wake()

    def start_gateway(self, name: str) -> None:
        self.gateways[name] = gateway = GatewayProcess(self, name)
        self.processes[gateway.pid] = gateway

    def start_worker(self, name: str) -> None:
        self.workers[name] = worker = WorkerProcess(self, name)
        self.processes[worker.pid] = worker
        self.note("%s starts", worker)

    # --- faults ---

    def strike(self) -> None:
        """One fault of whatever kind."""
        rng = self.rng
        role = rng.choice(("worker", "worker", "gateway", "scheduler"))
        if role == "scheduler":
            self._strike_scheduler()
        elif role == "gateway":
            self._strike_gateway(rng.choice(list(self.gateways.values())))
        else:
            self._strike_worker(rng.choice(list(self.workers.values())))

    def _stop_s(self) -> float:
        return self.rng.choice((0.3, 1.2, 2.1, 2.4, 3.5)) * self.rng.uniform(0.9, 1.1)

    def _strike_scheduler(self) -> None:
        scheduler = self.scheduler
        if scheduler is None or scheduler.stopped:
            return
        if self.rng.random() < 0.5:
            seconds = self._stop_s()
            scheduler.stop(seconds)
            for connection in list(scheduler.peers.values()):
                self._time_out(connection, seconds)
            return
        scheduler.die()
        self.scheduler = None
        for connection in list(scheduler.peers.values()):
            connection.break_off(self.rng.randrange(5 * MS), 0)
        self.after(self.rng.randrange(20 * MS, self.rng.choice((100 * MS, SECOND))), self.start_scheduler)

    def _time_out(self, connection: Connection, seconds: float) -> None:
        """One end stands still for so long: in time the other one takes the connection for dead."""
        notice_s = self.rng.uniform(2.0, 2.8)
        if seconds > notice_s:
            notice_ns, rest_ns = int(notice_s * SECOND), int(seconds * SECOND) + self.rng.randrange(3 * MS)
            standing_above = connection.scheduler.stopped
            below_ns, above_ns = (notice_ns, rest_ns) if standing_above else (rest_ns, notice_ns)
            # What was sent before still arrives, once the process goes on.
            self.after(below_ns, functools.partial(connection.dealer.on_broken, connection))
            self.after(above_ns, connection.learn_above)

    def _strike_gateway(self, gateway: GatewayProcess) -> None:
        if not gateway.alive or gateway.stopped:
            return
        kind = self.rng.choice(("crash", "stop", "leave", "break", "half-open"))
        self.note("%s: %s", gateway, kind)
        if kind == "stop":
            seconds = self._stop_s()
            gateway.stop(seconds)
            if gateway.dealer.connection is not None:
                self._time_out(gateway.dealer.connection, seconds)
        elif kind in ("crash", "leave"):
            gateway.die() if kind == "crash" else gateway.leave()
            if self.scheduler is not None:
                self.after(self.rng.randrange(3 * MS), functools.partial(self.scheduler.on_exit, gateway))
            self.after(self.rng.randrange(SECOND), lambda: self.start_gateway(gateway.name))
        else:
            self._break(gateway.dealer, kind)

    def _strike_worker(self, worker: WorkerProcess) -> None:
        if not worker.alive or worker.stopped or worker.hung:
            return
        kind = self.rng.choice(("crash", "stop", "hang", "drain", "drain", "drain at once", "break", "half-open"))
        self.note("%s: %s", worker, kind)
        self.num_worker_losses += 1  # at most: it may die, break off, or be silent for too long
        if kind == "stop":
            seconds = self._stop_s()
            worker.stop(seconds)
            worker.excuse(int((seconds + 1) * SECOND))
            if worker.dealer is not None and worker.dealer.connection is not None:
                self._time_out(worker.dealer.connection, seconds)
        elif kind == "crash":
            worker.die()
        elif kind == "hang":
            worker.hung = self.has_hung = True
            worker.excuse(STUCK_S * SECOND)
            self.after(STUCK_S * SECOND, lambda: worker.die() if worker.alive else None)
        elif kind.startswith("drain"):
            worker.signal()
            if kind == "drain at once":
                worker.signal()
        elif worker.dealer is not None:
            worker.excuse(8 * SECOND)
            self._break(worker.dealer, kind)

    def _break(self, dealer: Dealer, kind: str) -> None:
        if dealer.connection is None:
            return
        most_ns = 5 * MS if kind == "break" else 2800 * MS
        dealer.connection.break_off(self.rng.randrange(most_ns), self.rng.randrange(most_ns))

    def on_kill(self, process: Process) -> None:
        """The scheduler has a worker killed."""
        self.note("%s is killed by the scheduler", process)
        if not process.alive:
            return
        assert isinstance(process, WorkerProcess)
        if self.now_ns >= process.excused_until_ns:
            raise Violation(f"{process} is killed without a fault of its own")
        process.die()

    # --- clients ---

    def send_request(self, *, plain: bool = False, poison: bool = False) -> Sent:
        """A request of random shape to a random gateway. `plain`: that must be answered; `poison`: that cannot be."""
        rng, plan = self.rng, self.plan
        sequences = [
            np.array(rng.choices(range(VOCABULARY), k=rng.randint(1, plan.most_tokens)), dtype=np.int32)
            for _ in range(rng.randint(1, plan.most_sequences))
        ]
        is_far, cancels, timeout_s = True, False, FAR_S
        if poison:
            rng.choice(sequences)[0] = POISON
        elif not plain:
            draw = rng.random()
            if draw < 0.3:
                is_far, timeout_s = False, rng.uniform(0.01, 2)
            elif draw < 0.33:
                rng.choice(sequences)[0] = POISON
            elif draw < 0.36:
                rng.choice(sequences)[0] = NOT_FINITE
        gives_up_ns = deadline_ns = self.now_ns + int(timeout_s * SECOND)
        if not (plain or poison) and rng.random() < 0.1:
            cancels, gives_up_ns = True, self.now_ns + rng.randrange(1, 200 * MS)
        encoding = rng.choice(list(ENCODINGS))
        spans = [self._draw_spans(len(sequence)) for sequence in sequences] if rng.random() < 0.3 else None
        type_starts = [rng.randint(0, len(sequence)) for sequence in sequences] if rng.random() < 0.2 else None
        options = Options(
            FACTS.fingerprint, DIMENSIONS, True, encoding, rng.choice(LANES), deadline_ns, len(self.sent) % 3
        )
        entry = OpenRequest.of(sequences, options, type_starts=type_starts, spans=spans)
        number = len(self.sent)
        sent = Sent(number, entry, sequences, spans, type_starts, gives_up_ns, cancels, is_far)
        for sequence in sequences:
            key = sequence.tobytes()  # two requests may hold the same short sequence
            self._deadlines_ns[key] = max(deadline_ns, self._deadlines_ns.get(key, 0))
        self.sent.append(sent)
        gateway = rng.choice(list(self.gateways.values()))
        self.note("request %d (%s) to %s", number, encoding, gateway)
        gateway.submit(sent)
        return sent

    def _draw_spans(self, length: int) -> npt.NDArray[np.int32]:
        """Up to four spans of a sequence, or all of it."""
        if self.rng.random() < 0.3:
            return np.array([[0, length]], dtype=np.int32)
        starts = [self.rng.randrange(length) for _ in range(self.rng.randint(1, 4))]
        return np.array([[start, self.rng.randint(start + 1, length)] for start in starts], dtype=np.int32)

    # --- what must hold ---

    def check_outcome(self, sent: Sent) -> None:
        entry = sent.entry
        if entry.future.cancelled():
            sent.note_end("cancelled")
            return
        error = entry.future.exception()
        if error is None:
            sent.note_end("answered")
            # A sparse row begins with its length: what follows its values is no part of it.
            rows, expected = entry.future.result().rows, sent.expected()
            if len(rows) != len(expected) or any(
                row.tobytes()[: len(right)] != right for row, right in zip(rows, expected, strict=True)
            ):
                raise Violation(f"request {sent.number} is answered with wrong rows")
            if any((sequence == NOT_FINITE).any() for sequence in sent.sequences):
                raise Violation(f"request {sent.number} is answered with rows that are not finite")
            return
        if not isinstance(error, ServiceError):
            raise error
        sent.note_end(error.code)
        self.note("request %d ends with %s", sent.number, error.code)
        explained = {"shutting_down"}
        if self.num_worker_losses >= MAX_LOSSES and self.has_died:
            explained.add("input_quarantined")
        if self.num_worker_losses + self.num_failed_steps >= MAX_LOSSES:
            explained.add("internal_error")
        if any((sequence == NOT_FINITE).any() for sequence in sent.sequences):
            explained.add("nonfinite_output")
        if not sent.is_far:
            explained.add("deadline_exceeded")
        if self.has_hung:
            explained.add("no_capacity")
        if error.code not in explained:
            raise Violation(f"request {sent.number} ends with {error.code}")

    def check_dispatches(self, core: Scheduler, actions: list[Action]) -> None:
        """What a call of the scheduler sends to workers, before anything else happens."""
        for action in actions:
            if isinstance(action, Kill) or not isinstance(action.message, Batch):
                continue
            batch = action.message
            offsets = cu_seqlens(batch.lengths).tolist()
            for start, stop in itertools.pairwise(offsets):
                if self._deadlines_ns[batch.token_ids[start:stop].tobytes()] <= self.now_ns:
                    raise Violation(f"batch {batch.batch_id} is sent when it is too late")
            worker = core._fleet.get(action.peer)
            assert worker is not None
            self._check_order(core, [p for p in worker.in_flight[batch.batch_id].parts if not p.losses])

    def _check_order(self, core: Scheduler, parts: list[Part]) -> None:
        for part in parts:
            key = (part.pending.arrival, part.start)
            request = part.pending.request
            line = core._queue._lanes[request.lane].lines.get(request.tenant)
            for arrival, start, other in () if line is None else line.heap:
                if (arrival, start) < key and not other.losses and not other.pending.settled:
                    raise Violation(f"arrival {arrival} is overtaken by {part.pending.arrival} of its tenant")

    def check_scheduler(self, core: Scheduler) -> None:
        """At the end of a turn."""
        waiting = [part for lane in core._queue._lanes.values() for part in lane.parts()]
        places: dict[int, list[tuple[int, int]]] = {}  # by pending, of what waits and runs
        for worker in core._fleet.all():
            if not 0 <= len(worker.in_flight) <= 2:
                raise Violation(f"{worker.name} is given {len(worker.in_flight)} batches")
            for batch in worker.in_flight.values():
                for part in batch.parts:
                    places.setdefault(id(part.pending), []).append((part.start, part.stop))
        held_back = [part for loss in core._losses.pending_losses.values() for part in loss.parts]
        for part in (*waiting, *held_back):
            places.setdefault(id(part.pending), []).append((part.start, part.stop))
        for gateway in core._accounts.all():
            for pending in gateway.requests.values():
                spans = sorted(places.get(id(pending), []))
                if any(stop > start for (_, stop), (start, _) in itertools.pairwise(spans)):
                    raise Violation(f"a sequence of request {pending.request.request_id} runs twice: {spans}")
                if sum(stop - start for start, stop in spans) != pending.unanswered:
                    raise Violation(f"sequences of request {pending.request.request_id} are lost: {spans}")
        if len({(gateway.name, gateway.pid) for gateway in core._accounts.all()}) < len(core._accounts.all()):
            raise Violation("a gateway is there twice")
        if any(not part.pending.settled for part in waiting):
            for worker in core._fleet.all():
                if not worker.in_flight and self.now_ns - worker.last_heard_ns < SUSPECT_NS:
                    raise Violation(f"{worker.name} idles while work waits")

    def busy(self) -> str | None:
        """What is not at rest, if anything."""
        core = self.scheduler.core if self.scheduler is not None and not self.scheduler.stopped else None
        if core is None:
            return "there is no scheduler"
        for gateway in self.gateways.values():
            if not gateway.alive or gateway.stopped or gateway.open:
                return f"{gateway} has {len(gateway.open)} requests"
            if gateway.dealer.peer not in core._accounts:
                return f"{gateway} is not joined"
            if (readiness := gateway.ledger.readiness(self.now_ns)).status != "ready":
                return f"{gateway} is {readiness.status}: {readiness.reason}"
        for worker in self.workers.values():
            if not worker.alive or worker.stopped or worker.hung or worker.running is not None:
                return f"{worker} is not idle"
            if worker.dealer is None or core._fleet.get(worker.dealer.peer) is None:
                return f"{worker} is not joined"
        if len(core._queue) or core._losses.pending_losses or any(worker.in_flight for worker in core._fleet.all()):
            return "work waits, is held back or runs"
        if len(core._fleet.all()) > len(self.workers) or len(core._accounts.all()) > len(self.gateways):
            return "somebody who is gone is not forgotten"
        if core._fleet.ready(self.now_ns) < self.plan.num_workers:
            return "a worker is not ready"
        return None

    def check_empty(self) -> None:
        assert self.scheduler is not None
        core = self.scheduler.core
        held = {
            "requests without an end": sum(sent.end is None for sent in self.sent),
            "pieces in ledgers": sum(gateway.ledger.num_pieces for gateway in self.gateways.values()),
            "requests in the scheduler": sum(len(gateway.requests) for gateway in core._accounts.all()),
            "parts in the queue": len(core._queue),
            "parts held back": len(core._losses.pending_losses),
            "batches in the fleet": sum(len(worker.in_flight) for worker in core._fleet.all()),
            "batches in workers": sum(worker.core.num_held for worker in self.workers.values()),
            "strangers in the fleet": len(core._fleet.all()) - len(self.workers),
            "strange gateways": len(core._accounts.all()) - len(self.gateways),
        }
        if any(held.values()):
            raise Violation(f"at rest there are {', '.join(f'{n} {what}' for what, n in held.items() if n)}")


def result_of(batch: Batch) -> Result:
    """As the oracle has it, but for what is not finite."""
    result = oracle_result(batch)
    if NOT_FINITE not in batch.token_ids:
        return result
    counts = batch.span_counts if len(batch.span_counts) else np.ones_like(batch.lengths)
    bad = [
        bool((batch.token_ids[start:stop] == NOT_FINITE).any())
        for start, stop in itertools.pairwise(cu_seqlens(batch.lengths).tolist())
    ]
    return dataclasses.replace(result, nonfinite=np.flatnonzero(np.repeat(bad, counts)).astype(np.int32))


def short(message: Message) -> str:
    """A message without its arrays."""
    values = [
        f"{item.name}={getattr(message, item.name)}"
        for item in dataclasses.fields(message)
        if isinstance(getattr(message, item.name), int | str)
    ]
    return f"{type(message).__name__}({', '.join(values)})"


@dataclass(frozen=True)
class Outcome:
    """Of one run: why it failed, if it did, and what came of its requests."""

    seed: int
    num_events: int
    failure: str | None
    ends: list[str]
    trace: list[str] | None = field(default=None, repr=False)


async def play(
    seed: int, metrics: Metrics, plan: Plan = SHORT, cores: Cores = Cores(), *, trace: bool = False
) -> Outcome:
    """One run on the running loop, whose futures requests have; it never waits."""
    world = World(seed, metrics, plan, cores, trace=trace)
    failure = None
    try:
        world.play()
    except Exception as error:  # noqa: BLE001  # whatever it is, this seed has found it
        failure = f"{type(error).__name__}: {error}"
        if not isinstance(error, Violation):
            failure += "\n" + traceback.format_exc()
        world.note("%s", failure)
    return Outcome(seed, world.num_events, failure, [sent.end or "open" for sent in world.sent], world.trace)


def play_all(seeds: range, plan: Plan) -> tuple[dict[int, str], dict[str, int], int]:
    """The seeds that fail and why, how many requests ended how, and the number of events; in a process of its own."""
    logging.disable(logging.CRITICAL)

    async def run() -> tuple[dict[int, str], dict[str, int], int]:
        metrics = Metrics()
        failures: dict[int, str] = {}
        counts: dict[str, int] = {}
        num_events = 0
        for seed in seeds:
            outcome = await play(seed, metrics, plan)
            num_events += outcome.num_events
            for name in outcome.ends:
                counts[name] = counts.get(name, 0) + 1
            if outcome.failure is not None:
                failures[seed] = outcome.failure
        return failures, counts, num_events

    return asyncio.run(run())


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--long", action="store_true", help="longer runs, with messages through their bytes")
    parser.add_argument("--seed", type=int, help="run this one alone and print its log")
    arguments = parser.parse_args()
    plan = LONG if arguments.long else SHORT
    if arguments.seed is not None:
        logging.disable(logging.CRITICAL)
        outcome = asyncio.run(_play_one(arguments.seed, plan))
        sys.stdout.write("\n".join(outcome.trace or []) + "\n")
        return int(outcome.failure is not None)
    end = arguments.first + arguments.runs
    chunks = [range(first, min(first + 500, end)) for first in range(arguments.first, end, 500)]
    began_s, num_events, num_failures = time.monotonic(), 0, 0
    totals: dict[str, int] = {}
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        plans = functools.partial(play_all, plan=plan)
        for done, (failures, counts, events) in enumerate(pool.imap_unordered(plans, chunks), start=1):
            sys.stderr.write(f"\r{done} of {len(chunks)} parts, {time.monotonic() - began_s:.0f} s")
            num_events += events
            num_failures += len(failures)
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
            for seed, failure in failures.items():
                sys.stdout.write(f"seed {seed}: {failure}\n")
                sys.stdout.flush()
    seconds = time.monotonic() - began_s
    sys.stdout.write(
        f"{arguments.runs} runs from seed {arguments.first} in {seconds:.0f} s, {num_events} events, "
        f"{num_failures} failed; requests: {', '.join(f'{count} {name}' for name, count in sorted(totals.items()))}\n"
    )
    return int(num_failures > 0)


async def _play_one(seed: int, plan: Plan) -> Outcome:
    return await play(seed, Metrics(), plan, trace=True)


if __name__ == "__main__":
    sys.exit(main())
