"""The sockets: what is sent arrives, what cannot be sent says so, and nobody takes a place that is taken."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.errors import ProtocolError
from common.run_dir import RunDir
from common.wire.messages import Beat, Cancel
from common.wire.transport import Dealer, PeerGone, Router

Context = zmq.Context[zmq.Socket[bytes]]
NOBODY = 65534


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def router(run_dir: str, context: Context) -> Iterator[Router]:
    RunDir(run_dir).prepare()
    router = Router(context, RunDir(run_dir).address("workers"))
    yield router
    router.close()


@pytest.fixture
def dealer(context: Context, run_dir: str) -> Iterator[Dealer]:
    dealer = Dealer(context, RunDir(run_dir).address("workers"), "w")
    yield dealer
    dealer.close()


def wait_until_connected(dealer: Dealer) -> None:
    assert dealer.socket.poll(5000, zmq.POLLOUT)


def keep_sending(router: Router, peer: bytes) -> None:
    for _ in range(500):
        router.send(peer, Cancel(1))
        time.sleep(0.01)  # the end of a connection reaches libzmq's own thread a moment later


def test_messages_go_both_ways(router: Router, dealer: Dealer) -> None:
    wait_until_connected(dealer)
    assert dealer.send(Beat(1, 2))
    assert router.socket.poll(5000)
    received = router.receive()
    assert received is not None
    peer, message = received
    assert message == Beat(1, 2)
    router.send(peer, Cancel(3))
    assert dealer.socket.poll(5000)
    assert dealer.receive() == Cancel(3)
    assert (dealer.receive(), router.receive()) == (None, None)


def test_a_send_to_a_peer_that_left_says_so(router: Router, dealer: Dealer) -> None:
    wait_until_connected(dealer)
    dealer.send(Beat(1, 2))
    assert router.socket.poll(5000)
    peer, _ = router.receive() or (b"", None)
    dealer.close()
    with pytest.raises(PeerGone):
        keep_sending(router, peer)


def test_a_send_without_a_scheduler_is_false_and_hoards_nothing(run_dir: str, context: Context, dealer: Dealer) -> None:
    RunDir(run_dir).prepare()
    assert not dealer.send(Beat(1, 1))
    router = Router(context, RunDir(run_dir).address("workers"))
    wait_until_connected(dealer)
    assert not router.socket.poll(50)
    router.close()


def test_bytes_that_are_no_message_are_a_protocol_error_and_the_next_message_arrives(
    router: Router, dealer: Dealer
) -> None:
    wait_until_connected(dealer)
    dealer.socket.send_multipart([b"garbage", b"more"])
    dealer.send(Beat(1, 2))
    assert router.socket.poll(5000)
    with pytest.raises(ProtocolError):
        router.receive()
    assert router.socket.poll(5000)
    received = router.receive()
    assert received is not None
    assert received[1] == Beat(1, 2)


def test_a_deleted_socket_file_is_bound_again_for_newcomers_and_who_is_connected_stays_so(
    run_dir: str, context: Context, router: Router, dealer: Dealer
) -> None:
    wait_until_connected(dealer)
    dealer.send(Beat(1, 2))
    assert router.socket.poll(5000)
    peer, _ = router.receive() or (b"", None)
    assert not router.ensure_bound()
    (Path(run_dir) / "workers.sock").unlink()

    assert router.ensure_bound()

    newcomer = Dealer(context, RunDir(run_dir).address("workers"), "w")
    wait_until_connected(newcomer)
    newcomer.close()
    router.send(peer, Cancel(3))
    assert dealer.socket.poll(5000)
    assert dealer.receive() == Cancel(3)
    assert not router.ensure_bound()


def test_who_was_connected_stays_so_when_a_deleted_socket_file_is_bound_again(
    run_dir: str, router: Router, dealer: Dealer
) -> None:
    wait_until_connected(dealer)
    monitor = dealer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    Path(run_dir, "workers.sock").unlink()

    assert router.ensure_bound()

    assert not monitor.poll(200)
    dealer.socket.disable_monitor()
    monitor.close()


# A process of another user that connects, and says hello as ZeroMQ does: what became of it.
_OUTSIDER = """
import os, socket, sys
if int(sys.argv[2]) != os.getuid():
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
peer = socket.socket(socket.AF_UNIX)
peer.settimeout(5)
try:
    peer.connect(sys.argv[1])
    peer.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03")
    print("answered" if peer.recv(64) else "hung up on")
except PermissionError:
    print("kept out")
except (ConnectionResetError, BrokenPipeError):
    print("hung up on")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_kept_out_by_the_folder_and_hung_up_on_where_that_was_opened(
    run_dir: str, router: Router
) -> None:
    def connect_as(user: int) -> str:
        command = [sys.executable, "-S", "-c", _OUTSIDER, f"{run_dir}/workers.sock", str(user)]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=20, check=True)
        return found.stdout.strip()

    Path(run_dir).parent.chmod(0o755)
    assert connect_as(NOBODY) == "kept out"
    Path(run_dir).chmod(0o755)
    Path(run_dir, "workers.sock").chmod(0o777)
    assert connect_as(NOBODY) == "hung up on"
    assert connect_as(os.getuid()) == "answered"
