"""supervisord's plugin: what its loop waits for beside its children's pipes and its control socket."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator

import pytest

from common.deploy.supervision import Waker, plug_in


class Options:
    def __init__(self) -> None:
        self.socket_map: dict[int, object] = {7: "the control socket"}

    def get_socket_map(self) -> dict[int, object]:
        return self.socket_map


class Supervisord:
    """As much of supervisord as a plugin sees."""

    def __init__(self) -> None:
        self.options = Options()

    @property
    def waker(self) -> Waker:
        [waker] = [what for what in self.options.socket_map.values() if isinstance(what, Waker)]
        return waker


@pytest.fixture
def supervisord() -> Iterator[Supervisord]:
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    yield Supervisord()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, handler)


def is_awake(supervisord: Supervisord) -> bool:
    readable, _, _ = select.select([supervisord.waker.fd], [], [], 0)
    return bool(readable)


def test_the_first_turn_of_the_loop_does_not_wait(supervisord: Supervisord) -> None:
    plug_in(supervisord)

    assert is_awake(supervisord)
    assert supervisord.waker.readable()
    assert not supervisord.waker.writable()

    supervisord.waker.handle_read_event()
    assert not is_awake(supervisord)


def test_a_signal_ends_the_wait_whatever_number_of_them_there_was(supervisord: Supervisord) -> None:
    plug_in(supervisord)
    supervisord.waker.handle_read_event()

    for _ in range(3):
        os.kill(os.getpid(), signal.SIGCHLD)

    assert is_awake(supervisord)
    supervisord.waker.handle_read_event()
    assert not is_awake(supervisord)


def test_after_a_reload_nothing_waits_for_the_pipe_of_before(supervisord: Supervisord) -> None:
    plug_in(supervisord)
    before = supervisord.waker
    plug_in(supervisord)

    assert supervisord.waker is not before
    assert set(supervisord.options.socket_map) == {7, supervisord.waker.fd}
    assert is_awake(supervisord)


def test_it_adds_no_remote_call(supervisord: Supervisord) -> None:
    interface = plug_in(supervisord)

    assert not [name for name in dir(interface) if not name.startswith("_")]
