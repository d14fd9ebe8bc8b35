"""Carrying out the head's side of the handshake: ROUTER, children and signals around `handshake.FrontEndHandshake`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import zmq

from dp_engine import faults, logs
from dp_engine.endpoints import prepare
from dp_engine.faults import Fault
from dp_engine.handshake import FrontEndHandshake, HandshakeError
from dp_engine.processes import Child, Stopper, finished

POLL_S = 10
BATCH = 64  # messages between two looks at the children


class StartError(Exception):
    """The group cannot start; the process exits with status 1."""


def run_handshake(
    machine: FrontEndHandshake,
    *,
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    children: list[Child],
    front_ends: Sequence[Child] = (),
    stopper: Stopper,
    fault_list: tuple[Fault, ...],
) -> bool:
    """Serve the handshake until every rank is READY; no time limit, as in vLLM. False when told to stop.

    `children` are ranks and coordinator, `front_ends` API servers: the end of one of them is told apart.
    Raises StartError for whatever ends vLLM's start: a bad frame, a dead child, an address that is not ours.
    """
    faults.sleep_if(fault_list, "late-bind", 0)
    with context.socket(zmq.ROUTER) as router:
        prepare(router)
        router.setsockopt(zmq.LINGER, 0)
        if "[" in address:
            router.setsockopt(zmq.IPV6, 1)
        try:
            router.bind(address)
        except zmq.ZMQError as failure:
            raise StartError(f"cannot bind the handshake socket at {address}: {failure.strerror}") from failure
        logs.info(f"Handshake socket bound at {address}: waiting for {machine.waiting_for()}")
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(stopper.fd, zmq.POLLIN)
        watched = [*children, *front_ends]
        for child in watched:
            poller.register(child.pidfd, zmq.POLLIN)
        told_s = time.monotonic()
        while not machine.done:
            events = dict(poller.poll(POLL_S * 1000))
            if stopper.requested:
                return False
            # A dead child counts even when a HELLO waits.
            if any(child.pidfd in events for child in watched):
                _check_children(finished(children), finished(front_ends))
            if router in events:
                _answer_waiting(machine, router)
            if time.monotonic() - told_s >= POLL_S and not machine.done:
                told_s = time.monotonic()
                logs.info(f"Waiting for {machine.waiting_for()}")
    logs.info("All engines are READY; the handshake port is closed")
    return True


def _check_children(dead: dict[str, int], gone: dict[str, int]) -> None:
    """Names and exit codes of ranks (or the coordinator) and of front ends that have ended. Raises StartError."""
    front_ends = f"front end process(es) ended: {gone}" if gone else ""
    if dead:
        raise StartError(
            f"Engine core initialization failed. Failed core proc(s): {dead}" + (front_ends and f", {front_ends}")
        )
    if gone:
        raise StartError(f"Start failed while engines were initializing: {front_ends}")


def _answer_waiting(machine: FrontEndHandshake, router: zmq.Socket[bytes]) -> None:
    """Answer what has come, but look at the children now and then. Raises StartError."""
    for _ in range(BATCH):
        try:
            frames = router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            reply = machine.receive(frames)
        except (HandshakeError, msgspec.DecodeError, KeyError, TypeError, ValueError) as failure:
            raise StartError(f"{type(failure).__name__}: {failure}") from failure
        if reply:
            router.send_multipart(reply)
        if machine.done:
            return
