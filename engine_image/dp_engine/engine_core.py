"""A rank that serves: requests in, tokens out, counts to the coordinator, until it is told to stop.

Everything that decides is elsewhere and pure (`scheduler`, `waves`, `wire`, `faults.Armed`); here are the sockets, the
clock and the order of things (protocol notes §3 and §4).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from dp_engine import faults, handshake, logs, wire
from dp_engine.endpoints import connect_socket
from dp_engine.faults import Armed
from dp_engine.modes import Launch
from dp_engine.options import Options
from dp_engine.processes import Stopper
from dp_engine.rendezvous import Group
from dp_engine.scheduler import Scheduler
from dp_engine.versions import wire_of
from dp_engine.waves import Finished, Waves
from dp_engine.wire import Outputs

Socket = zmq.Socket[bytes]


class EngineConfig(Struct, frozen=True, kw_only=True):
    """What a rank's process is started with. `local` and `headless` are what it says in HELLO (§2.3).

    `own_handshake_address`: where this node's own front end shakes hands as well, when that is not the group's head
    (§2.4). `devices` are those of the node that are this rank's.
    """

    rank: int
    launch: Launch
    options: Options
    handshake_address: str
    local: bool
    headless: bool
    own_handshake_address: str | None = None
    platform: str = "cuda"
    devices: tuple[str, ...] = ()


class EngineCore:
    """Sockets and state of a rank that serves."""

    def __init__(
        self,
        config: EngineConfig,
        context: zmq.Context[Socket],
        addresses: handshake.Addresses,
        group: Group | None,
    ) -> None:
        self._config = config
        self._rank = config.rank
        self._group = group
        options = config.options
        self._wire = wire_of(options.version)
        self._waves = None
        if group is not None:
            self._waves = Waves(rank=config.rank, wire=self._wire, sync_interval_steps=options.sync_interval_steps)
        self._scheduler = Scheduler(
            rank=config.rank, max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens
        )
        identity = wire.identity(config.rank)
        self._inputs = [
            connect_socket(context, zmq.DEALER, address, identity=identity, linger_ms=4000)
            for address in addresses.inputs
        ]
        self._outputs = [connect_socket(context, zmq.PUSH, address, linger_ms=4000) for address in addresses.outputs]
        self._coordinator_in: Socket | None = None
        self._coordinator_out: Socket | None = None
        if addresses.coordinator_input and addresses.coordinator_output:
            self._coordinator_in = connect_socket(
                context, zmq.XSUB, addresses.coordinator_input, identity=identity, linger_ms=0
            )
            self._coordinator_out = connect_socket(context, zmq.PUSH, addresses.coordinator_output, linger_ms=4000)
            self._coordinator_in.send(wire.SUBSCRIBE)
        self._send_first_frames(addresses)
        # Dense ranks of 0.14 to 0.26 keep their counts to themselves, and so do ranks that somebody else balances.
        balanced_here = config.launch.load_balancing != "external"
        self._tells_counts = balanced_here and (self._wire.dense_counts or group is not None)
        self._interval_s = 1 / options.tokens_per_second if options.tokens_per_second > 0 else 0.0
        self._next_step_s: float | None = None
        self._told_counts: tuple[int, int] | None = None
        self._sleeping = False
        self._paused = False  # by an administrator; requests wait
        self._drain_until_s: float | None = None
        # Made when service begins: until then SIGTERM ends the process at once, and faults count from READY.
        self._armed: Armed
        self._stopper: Stopper
        self._poller = zmq.Poller()
        self._ballast: list[bytes] = []

    def _send_first_frames(self, addresses: handshake.Addresses) -> None:
        options, launch = self._config.options, self._config.launch
        response = wire.ready_response(
            keys=self._wire.first_frame_keys,
            rank=self._rank,
            version=options.version,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
            # A dense rank is an engine of its own: it knows of no group since 0.14.
            data_parallel_size=launch.size if launch.coordinated else 1,
            stats_address=addresses.frontend_stats_publish_address,
            instance_id=f"stand-in-{self._rank}",
        )
        for socket in self._inputs:
            socket.send(response)

    def wait_for_coordinator(self) -> None:
        """Block until every rank of the group has subscribed; nobody gives up here, as in vLLM."""
        if self._coordinator_in is None:
            return
        while not self._coordinator_in.poll(10_000):
            logs.info("Waiting for READY message from DP Coordinator...")
        self._coordinator_in.recv()

    def tell_dead(self) -> None:
        for socket in self._outputs:
            socket.send(wire.ENGINE_CORE_DEAD)

    def serve(self) -> None:
        """Answer until SIGTERM, then drain for --shutdown-timeout. Raises GroupBrokenError when a peer is gone."""
        self._armed = Armed(self._config.options.faults, rank=self._rank, now=time.monotonic())
        self._stopper = Stopper(pokes=self._armed.waits_for_signal)
        for socket in self._inputs:
            self._poller.register(socket, zmq.POLLIN)
        if self._coordinator_in is not None:
            self._poller.register(self._coordinator_in, zmq.POLLIN)
        self._poller.register(self._stopper.fd, zmq.POLLIN)
        while True:
            events = dict(self._poller.poll(self._timeout_ms()))
            if self._stopper.fd in events:
                self._signalled()
            self._strike()
            if self._drained():
                return
            try:
                self._read(events)
            except wire.MALFORMED as failure:
                # vLLM's one input thread dies without a word to anybody: the rank is deaf from here on.
                logs.error(f"Input thread died of a malformed message: {type(failure).__name__}: {failure}")
                self._stop_reading()
            if self._wire.counts_before_step:
                self._tell_counts()
            stepped = self._busy() and self._step_is_due()
            if stepped and not self._step():
                return
            if stepped or not self._busy():
                self._tell_counts()

    def _signalled(self) -> None:
        self._stopper.clear()
        now = time.monotonic()
        if self._stopper.poked:
            self._stopper.poked = False
            self._armed.signalled(now)
        if self._stopper.requested and self._drain_until_s is None:
            timeout_s = self._config.options.shutdown_timeout_s
            logs.info(f"Shutting down: {sum(self._scheduler.counts)} requests, draining for {timeout_s:g} s")
            self._drain_until_s = now + timeout_s

    def _drained(self) -> bool:
        """Told to stop, and either nothing is left or the time is up."""
        if self._drain_until_s is None:
            return False
        return not self._scheduler.unfinished or time.monotonic() >= self._drain_until_s

    def _strike(self) -> None:
        """Suffer the faults that are due."""
        for fault in self._armed.due(time.monotonic()):
            match fault.kind:
                case "crash" | "crash-after-ready":
                    faults.crash(fault)
                case "fatal":
                    faults.struck(fault)
                    raise RuntimeError("fault fatal")
                case "hang":
                    faults.struck(fault)
                    faults.sleep_for_ever()
                case "stop-reading":
                    faults.struck(fault)
                    self._stop_reading()
                case "drop-coordinator":
                    faults.struck(fault)
                    self._drop_coordinator()
                case "grow-memory":
                    self._ballast.append(b"x" * (fault.mib * 2**20))
                    faults.struck(fault, f"{len(self._ballast) * fault.mib} MiB")
                case "garbage-output":
                    faults.struck(fault)
                    for socket in self._outputs:
                        socket.send(b"\xc1garbage")

    def _drop_coordinator(self) -> None:
        if self._coordinator_in is not None and self._coordinator_out is not None:
            if self._coordinator_in in self._poller:
                self._poller.unregister(self._coordinator_in)
            self._coordinator_in.close()
            self._coordinator_out.close()
        self._coordinator_in = self._coordinator_out = None

    def _busy(self) -> bool:
        if self._waves is not None and self._waves.running:
            return True
        return self._scheduler.unfinished and not self._paused

    def _timeout_ms(self) -> int | None:
        """Until the next step or fault, or None: until something comes."""
        if self._drained():
            return 0
        ends = [time_s for time_s in (self._drain_until_s, self._armed.next_s) if time_s is not None]
        if self._busy():
            ends.append(self._next_step_s if self._next_step_s is not None else time.monotonic())
        if not ends:
            return None
        return max(0, round((min(ends) - time.monotonic()) * 1000))

    def _step_is_due(self) -> bool:
        """Keep an even pace while busy: the first step comes one interval after the work."""
        now = time.monotonic()
        if self._next_step_s is None:
            self._next_step_s = now + self._interval_s
        # The poll above counts whole milliseconds.
        if now + 0.0005 < self._next_step_s:
            return False
        self._next_step_s = max(self._next_step_s + self._interval_s, now)
        return True

    def _step(self) -> bool:
        """One token for every running request; in a lock-stepped group, together with all other ranks.

        False when told to stop in the middle.
        """
        outputs = {} if self._paused else self._scheduler.step()
        if self._waves is not None and self._group is not None:
            # A rank without requests takes part too: that is vLLM's dummy batch.
            unfinished = self._unfinished_anywhere(self._group)
            if unfinished is None:
                return False
            if done := self._waves.stepped(any_unfinished=unfinished):
                self._wave_is_complete(done, self._waves.wave - 1)
        stats: dict[str, Any] | None = self._stats()
        for client, message in outputs.items():
            # One front end hears the counts; the newest value wins when metrics are merged.
            self._to_client(client, msgspec.structs.replace(message, stats=stats))
            stats = None
        if not self._busy():
            self._next_step_s = None
        return True

    def _unfinished_anywhere(self, group: Group) -> bool | None:
        """The group's answer, None when this rank was told to stop before the others gave theirs."""
        mine = self._scheduler.unfinished
        while True:
            answer = group.any(
                mine=mine, wake_fd=self._stopper.fd, timeout_s=self._config.options.cpu_distributed_timeout_s
            )
            if answer is not None:
                return answer
            self._signalled()
            self._strike()
            if self._drained():
                return None

    def _wave_is_complete(self, done: Finished, wave: int) -> None:
        logs.info(f"Wave {wave} complete")
        if self._coordinator_out is None:
            # Offline there is no coordinator: every rank tells its own client.
            self._to_client(0, Outputs(engine=self._rank, wave_complete=wave))
        elif done.report is not None:
            self._to_coordinator(Outputs(engine=self._rank, wave_complete=done.report))

    def _stats(self) -> dict[str, Any]:
        waiting, running = self._scheduler.counts
        return {
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "step_counter": self._waves.step_counter if self._waves else 0,
            "current_wave": self._waves.wave if self._waves else 0,
            "kv_cache_usage": self._scheduler.kv_usage,
        }

    def _tell_counts(self) -> None:
        """Tell the coordinator when the counts have changed: after a step, since 0.22 also before it."""
        counts = self._scheduler.counts
        if not self._tells_counts:
            return
        if counts != self._told_counts and self._coordinator_out is not None:
            self._told_counts = counts
            self._to_coordinator(Outputs(engine=self._rank, stats=self._stats()))

    def _to_coordinator(self, message: Outputs) -> None:
        if self._coordinator_out is not None:
            self._coordinator_out.send(self._encoded(message))

    def _to_client(self, client: int, message: Outputs) -> None:
        if 0 <= client < len(self._outputs):
            self._outputs[client].send(self._encoded(message))

    def _encoded(self, message: Outputs) -> bytes:
        slot = self._wire.weight_version_slot
        return wire.encode_outputs(message, now=time.monotonic(), weight_version_slot=slot)

    def _read(self, events: dict[Any, int]) -> None:
        """Take all that has come. Raises what decoding raises."""
        for socket in self._inputs:
            while socket in events and socket in self._poller:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(frames)
        subscriber = self._coordinator_in
        if subscriber is not None and subscriber in events and subscriber in self._poller:
            frames = subscriber.recv_multipart()
            if frames != [wire.COORDINATOR_READY]:  # said again when another rank has come late
                self._take(frames)

    def _stop_reading(self) -> None:
        for socket in [*self._inputs, self._coordinator_in]:
            if socket is not None and socket in self._poller:
                self._poller.unregister(socket)

    def _take(self, frames: list[bytes]) -> None:
        kind, payload = frames[0], frames[1]
        if kind == wire.ADD:
            self._add(wire.decode_add(payload))
        elif kind == wire.ABORT:
            for client, ids in self._scheduler.abort(wire.decode(payload)).items():
                self._to_client(client, Outputs(engine=self._rank, finished=ids, stats=self._stats()))
        elif kind == wire.START_DP_WAVE:
            wave, exclude = wire.decode(payload)
            if self._waves is not None:
                self._announce(self._waves.start_received(wave, exclude))
        elif kind == wire.UTILITY:
            client, call_id, method, arguments = wire.decode(payload)
            failure, value = self._utility(method, arguments)
            result = None if failure else [None, value]
            self._to_client(client, Outputs(engine=self._rank, utility=[call_id, failure, result]))
        else:
            raise ValueError(f"unknown kind of request {kind!r}")

    def _add(self, request: wire.Request) -> None:
        self._strike_on_request()
        if self._drain_until_s is not None:
            rejected: list[Any] = [request.request_id, [], None, None, None, int(wire.FinishReason.ABORT)]
            message = Outputs(engine=self._rank, outputs=[rejected], finished=[request.request_id])
            self._to_client(request.client_index, message)
            return
        self._scheduler.add(request)
        self._wake_the_others(request.wave)

    def _wake_the_others(self, wave: int) -> None:
        """There is work: the lock-stepped group must run, unless an administrator has paused this rank."""
        if self._waves is not None and not self._paused:
            self._announce(self._waves.request_arrived(wave))

    def _strike_on_request(self) -> None:
        for fault in self._armed.request_arrived():
            if fault.kind == "crash-on-request":
                faults.crash(fault)
            faults.struck(fault, f"request {fault.n}")
            if fault.kind == "fatal-on-request":
                raise RuntimeError("fault fatal-on-request")
            faults.sleep_for_ever()

    def _announce(self, wave: int | None) -> None:
        if wave is not None:
            self._to_coordinator(Outputs(engine=self._rank, start_wave=wave))

    def _utility(self, method: str, arguments: list[Any]) -> tuple[str | None, Any]:
        """(failure text, None) or (None, value)."""
        if self._drain_until_s is not None:
            return "Server shutting down", None
        match method:
            case "get_supported_tasks":
                return None, ["generate"]
            case "is_sleeping":
                return None, self._sleeping
            case "sleep" | "wake_up":
                self._sleeping = method == "sleep"
                return None, None
            case "reset_mm_cache" | "reset_encoder_cache" | "profile" | "save_sharded_state" | "execute_dummy_batch":
                return None, None
            case "reset_prefix_cache":
                return None, True
            case "pause_scheduler" | "resume_scheduler":
                self._paused = method == "pause_scheduler"
                if self._scheduler.unfinished and self._waves is not None:
                    self._wake_the_others(self._waves.wave)
                return None, None
            case "is_scheduler_paused":
                return None, self._paused
            case "add_lora" | "remove_lora" | "pin_lora":
                return None, False
            case "list_loras" | "get_kv_cache_group_metadata":
                return None, []
            case "collective_rpc":
                return None, [None]
            case "inject_fault" if self._config.options.fault_endpoint:
                try:
                    fault = faults.parse_fault(str(arguments[0]))
                except (ValueError, IndexError) as failure:
                    return str(failure), None
                self._armed.add(fault, now=time.monotonic())
                return None, None
        return f"Call to {method} method failed: 'EngineCoreProc' object has no attribute {method!r}", None
