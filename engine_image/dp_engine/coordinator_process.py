"""The coordinator's process: three sockets around the state machine in `coordinator`."""

from __future__ import annotations

import os
import time

import msgspec
import zmq
from msgspec import Struct

from dp_engine import logs
from dp_engine.coordinator import BarrierBrokenError, Coordinator, Send
from dp_engine.endpoints import bind_socket
from dp_engine.modes import Launch
from dp_engine.versions import Wire


class CoordinatorEndpoints(Struct, frozen=True, kw_only=True):
    """What the coordinator tells its parent once it has bound."""

    stats: str  # front ends subscribe here
    engine_input: str  # engines subscribe here
    engine_output: str  # engines push here


def run_coordinator(launch: Launch, wire_family: Wire, report_fd: int) -> int:
    """Serve until killed; 1 when the barrier breaks. `report_fd` gets CoordinatorEndpoints as JSON."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    remote_front_ends = launch.load_balancing != "internal"
    front, stats = bind_socket(context, zmq.XPUB, host=launch.address, local_only=not remote_front_ends)
    back, engine_input = bind_socket(context, zmq.XPUB, host=launch.address, local_only=launch.all_local)
    output, engine_output = bind_socket(context, zmq.PULL, host=launch.address, local_only=launch.all_local)
    for publisher in (front, back):
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
    found = CoordinatorEndpoints(stats=stats, engine_input=engine_input, engine_output=engine_output)
    os.write(report_fd, msgspec.json.encode(found))
    os.close(report_fd)
    core = Coordinator(size=launch.size, waves=launch.coordinated, wire_family=wire_family)
    publishers = {"front": front, "back": back}

    def perform(sends: list[Send]) -> None:
        for send in sends:
            publishers[send.to].send_multipart(send.frames)

    poller = zmq.Poller()
    for socket in (front, back, output):
        poller.register(socket, zmq.POLLIN)
    try:
        while True:
            timeout_s = core.timeout_s(time.monotonic())
            events = dict(poller.poll(None if timeout_s is None else round(timeout_s * 1000)))
            if not events and core.started:
                perform(core.tick(time.monotonic()))
            if back in events:
                was_started = core.started
                perform(core.from_back(back.recv(), time.monotonic()))
                if core.started and not was_started:
                    logs.info(f"All {launch.size} engines subscribed: READY sent")
            if output in events:
                perform(core.from_engine(output.recv()))
            if front in events:
                perform(core.from_front(front.recv()))
    except BarrierBrokenError as broken:
        logs.error(f"DP Coordinator: {broken}")
        return 1
