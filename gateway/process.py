"""The gateway's process: its listening socket, its event loop, and the signals that stop it or renew its keys.

Under a supervisor the process inherits the socket (supervisord's fcgi-program passes it as standard input). The socket
outlives the process, so a restart resets no connection: new ones wait in the socket's queue. The process closes it and
never shuts it down. Rejected: SO_REUSEPORT, with 21 resets in 5,670 connections, against none in 5,001.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import stat
from collections.abc import Callable

import uvloop

from common import environment, log
from common.config import GatewayConfig
from common.errors import EX_CONFIG, EX_FAILURE
from common.metrics import Metrics, open_metrics
from common.run_dir import RunDir
from common.text.tokenization import bound_tokenizer_threads
from gateway.app import Gateway
from gateway.client import SchedulerClient
from gateway.edge.auth import KeyCheck, KeysRefused, known_keys

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_REFUSED_S = 10.0


def main(config: GatewayConfig, on_ready: Callable[[], None]) -> int:
    """Serve until a signal comes. Returns the exit status. `on_ready` is called once clients can connect."""
    bound_tokenizer_threads(config.tokenizer_threads)
    try:
        keys = KeyCheck(known_keys(config.api_keys_file, environment.api_key()))
    except KeysRefused as error:
        logger.error("cannot start: %s", error)  # noqa: TRY400 the text says it all
        return EX_CONFIG
    try:
        sock = _inherited_socket() or _bind(config.host, config.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            logger.error("port %d of %s is taken; stop what uses it, or use another --port", config.port, config.host)  # noqa: TRY400
        else:
            logger.error("cannot listen on port %d of %s: %s", config.port, config.host, error.strerror)  # noqa: TRY400
        return EX_FAILURE
    metrics = open_metrics(config.run_dir)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, metrics, keys, sock, on_ready))


async def _serve(
    config: GatewayConfig, metrics: Metrics, keys: KeyCheck, sock: socket.socket, on_ready: Callable[[], None]
) -> int:
    name = f"gateway-{config.slot}"
    clients = [
        SchedulerClient(run_dir.path, name, metrics, model=model)
        for model, run_dir in RunDir(config.run_dir).model_dirs(config.models).items()
    ]
    gateway = Gateway(config, clients, metrics, keys=keys)
    stop, stop_now, hangup = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    # A scheduler of another version refuses this gateway, for example after an upgrade. The process then ends, since a
    # new one has the code that is installed now. It waits first, in case the scheduler is the old one, and answers 503.
    for client in clients:
        client.on_refused = lambda: loop.call_later(_REFUSED_S, stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    renewing = asyncio.create_task(_renew(config, keys, hangup))
    await gateway.start(sock)
    # Objects that exist now never become garbage, and requests leave almost none. Collecting as often as usual took 4 %
    # of a gateway's time (2026-11-30).
    gc.freeze()
    gc.set_threshold(10_000)
    logger.info("listening on %s port %d", *sock.getsockname()[:2])
    on_ready()
    await stop.wait()
    logger.info("stopping: nothing more is accepted")
    draining = asyncio.ensure_future(gateway.drain())
    hurried = asyncio.ensure_future(stop_now.wait())
    await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        logger.warning("a second signal: stopping at once")
        gateway.abort()
        draining.cancel()
    hurried.cancel()
    renewing.cancel()
    await gateway.close()
    logger.info("stopped")
    if any(client.refused for client in clients):
        return EX_CONFIG
    return 0 if not stop_now.is_set() else EX_FAILURE


async def _renew(config: GatewayConfig, keys: KeyCheck, hangup: asyncio.Event) -> None:
    """At each SIGHUP open the log's file and read the keys again. If one fails, the old one stays in use."""
    while True:
        await hangup.wait()
        hangup.clear()
        try:
            await asyncio.to_thread(log.reopen)
        except OSError as error:
            logger.error("the log's file stays as it was: %s", error.strerror)  # noqa: TRY400 the text says it all
        if not config.api_keys_file:
            continue
        try:
            known = await asyncio.to_thread(known_keys, config.api_keys_file, environment.api_key())
        except KeysRefused as error:
            logger.error("the keys stay as they were: %s", error)  # noqa: TRY400 the text says it all
        else:
            keys.replace(known)
            logger.info("%d keys from now on", len(known))


def _inherited_socket() -> socket.socket | None:
    """The listening socket that a supervisor passed as standard input, as a copy: descriptor 0 stays open."""
    try:
        if not stat.S_ISSOCK(os.fstat(0).st_mode):
            return None
    except OSError:
        return None  # there is no standard input
    sock = socket.socket(fileno=os.dup(0))
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        return None
    sock.setblocking(False)
    return sock


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Here and not in the event loop: of two sockets bound with SO_REUSEADDR, only the second one's listen fails.
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
