"""An API server's view of the engines: who is alive, who is least busy, and where every answer belongs.

vLLM's load-balancing client (protocol notes §4 and §5) over asyncio: requests go out on a ROUTER, answers come in on
a PULL, the coordinator's counts on an XSUB.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio
from msgspec import Struct

from dp_engine import logs, wire
from dp_engine.balance import Balancer
from dp_engine.logprobs import TokenLogprob, unpack
from dp_engine.metrics import Writer
from dp_engine.versions import Wire
from dp_engine.wire import FinishReason


class EngineDeadError(Exception):
    """An engine has died, and with it the group."""


class Delta(Struct, frozen=True, kw_only=True):
    """New tokens of one request; `finish` on the last."""

    token_ids: list[int]
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None


class _Pending:
    """A request that is under way."""

    def __init__(self, *, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self.sent_s = time.monotonic()
        self.tokens = 0
        self.last_s: float | None = None


class EngineClient:
    """`ranks` are the engines that this front end manages, by global rank.

    `subscribe` connects to the coordinator's counts when the address comes only with the engines' first frames, as it
    does on nodes that are not the head's. Without a coordinator there is no such address.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        client: int,
        clients: int,
        waves: bool,
        family: Wire,
        inputs: zmq.Socket[bytes],
        outputs: zmq.Socket[bytes],
        stats: zmq.Socket[bytes] | None,
        metrics: Writer,
        subscribe: Callable[[str], zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._ranks = list(ranks)
        self._position = {rank: position for position, rank in enumerate(ranks)}
        self._client = client
        self._family = family
        self._subscribe = subscribe
        self._announces_waves = waves and family.front_end_starts_waves
        self._inputs = zmq.asyncio.Socket.from_socket(inputs)
        self._outputs = zmq.asyncio.Socket.from_socket(outputs)
        self._stats = None if stats is None else zmq.asyncio.Socket.from_socket(stats)
        self._metrics = metrics
        self._balancer = Balancer(engines=len(self._ranks), client=client, clients=clients, wire=family)
        self.max_model_len: int | None = None  # the least of what the engines said
        self.blocks = 0  # cache blocks of all engines
        self.finished_waves = 0  # offline, where engines report to their client
        self._pending: dict[str, _Pending] = {}
        self._engine_of: dict[str, int] = {}  # until the engine itself says that the request is finished
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._wave = 0
        self._group_running = False
        self._tasks: list[asyncio.Task[None]] = []
        self.dead: str | None = None
        self.died = asyncio.Event()

    @property
    def ranks(self) -> Sequence[int]:
        return tuple(self._ranks)

    @property
    def engine_count(self) -> int:
        return len(self._ranks)

    @property
    def unfinished(self) -> int:
        return len(self._pending)

    def check_alive(self) -> None:
        """Raises EngineDeadError."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    async def connect(self, *, timeout_s: float) -> None:
        """Wait for every engine's first frame, then until all answer. Raises TimeoutError, EngineDeadError.

        A strange frame raises KeyError, ValueError or msgspec.DecodeError. `timeout_s` starts anew with every engine that arrives.
        """
        missing = set(self._ranks)
        while missing:
            identity, response = await asyncio.wait_for(self._inputs.recv_multipart(), timeout_s)
            rank = int.from_bytes(identity, "little")
            if rank not in self._position:
                raise KeyError(f"first frame of rank {rank}, which is not managed here")
            missing.discard(rank)
            if response:
                self._take_response(wire.decode(response))
        self._tasks = [asyncio.create_task(self._read_outputs())]
        if self._stats is not None:
            self._tasks.append(asyncio.create_task(self._read_stats(self._stats)))
        for task in self._tasks:
            task.add_done_callback(self._reader_ended)
        # Engines answer only after the coordinator's READY, so this is the last barrier before the port opens.
        await asyncio.gather(*(self.call(rank, "get_supported_tasks") for rank in self._ranks))

    def _take_response(self, response: dict[str, Any]) -> None:
        """An engine's first frame since 0.20: its limits, and where the coordinator publishes."""
        length = response.get("max_model_len")
        if isinstance(length, int):
            self.max_model_len = length if self.max_model_len is None else min(length, self.max_model_len)
        self.blocks += response.get("num_gpu_blocks") or 0
        address = response.get("dp_stats_address")
        if address and self._stats is None and self._subscribe is not None:
            self._stats = zmq.asyncio.Socket.from_socket(self._subscribe(address))

    def slept(self, level: int) -> None:
        """All engines sleep at this level now, 0: they are awake."""
        for rank in self._ranks:
            self._metrics.sleep_level(rank, level)

    async def call(self, rank: int, method: str, *arguments: object) -> Any:
        """Call a utility method of one engine. Raises RuntimeError with the engine's failure text, or EngineDeadError."""
        self.check_alive()
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(rank, wire.UTILITY, wire.encode([self._client, call_id, method, list(arguments)]))
        return await future

    def _send(self, rank: int, kind: bytes, payload: bytes) -> None:
        # A ROUTER without limits sends at once or drops silently: a request to a vanished engine hangs, as in vLLM.
        self._inputs.send_multipart([wire.identity(rank), kind, payload])

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], sampling: dict[str, Any], *, position: int | None
    ) -> AsyncIterator[Delta]:
        """Answer one request; leaving the iterator early aborts it. Raises EngineDeadError, ValueError for a bad answer.

        `position` chooses an engine among those managed here, None leaves it to the balancer. Two requests may have the
        same `request_id`: engines know each by a name of its own.
        """
        self.check_alive()
        external_id, request_id = request_id, f"{request_id}-{os.urandom(4).hex()}"
        if position is None:
            chosen = self._balancer.pick()
        else:
            chosen = position
            self._balancer.sent(chosen)
        rank = self._ranks[chosen]
        pending = _Pending(prompt_tokens=len(prompt_token_ids))
        self._pending[request_id] = pending
        self._engine_of[request_id] = chosen
        payload = wire.encode_add(
            request_id=request_id,
            external_id=external_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            rank=None if position is None else rank,
            client_index=self._client,
            wave=self._wave,
            layout=self._family.add_layout,
        )
        self._send(rank, wire.ADD, payload)
        if self._announces_waves and not self._group_running and self._stats is not None:
            self._stats.send(wire.encode([wire.identity(rank), self._wave]))
        self._metrics.count(rank, "prompt_tokens", len(prompt_token_ids))
        finish: FinishReason | None = None
        try:
            while finish is None:
                delta = await pending.queue.get()
                if isinstance(delta, Exception):
                    raise delta
                self._measure(rank, pending, delta)
                finish = delta.finish
                yield delta
        finally:
            self._pending.pop(request_id, None)
            if finish is None and self.dead is None:
                self._send(rank, wire.ABORT, wire.encode([request_id]))
                self._metrics.count(rank, "abort")

    def _measure(self, rank: int, pending: _Pending, delta: Delta) -> None:
        now = time.monotonic()
        pending.tokens += len(delta.token_ids)
        self._metrics.count(rank, "generation_tokens", len(delta.token_ids))
        if pending.last_s is None:
            self._metrics.observe(rank, "time_to_first_token", now - pending.sent_s)
        else:
            self._metrics.observe(rank, "inter_token", now - pending.last_s)
        pending.last_s = now
        if delta.finish is not None:
            self._metrics.observe(rank, "e2e_request", now - pending.sent_s)
            self._metrics.observe(rank, "prompt_size", pending.prompt_tokens)
            self._metrics.observe(rank, "answer_size", pending.tokens)
            self._metrics.count(rank, wire.FINISH_NAMES.get(delta.finish, "error"))

    async def _read_outputs(self) -> None:
        while True:
            frames = await self._outputs.recv_multipart()
            if frames[0] == wire.ENGINE_CORE_DEAD:
                self.die("an engine said ENGINE_CORE_DEAD")
                continue
            try:
                self._take(wire.decode_outputs(frames[0]))
            except wire.MALFORMED as failure:
                logs.error(f"Dropped a malformed output: {type(failure).__name__}: {failure}")

    def _take(self, message: wire.Outputs) -> None:
        for item in message.outputs:
            pending = self._pending.get(item[0])
            if pending is not None:
                pending.queue.put_nowait(_delta_or_failure(item))
        for request_id in message.finished or ():
            engine = self._engine_of.pop(request_id, None)
            if engine is not None:
                self._balancer.finished(engine)
        if message.stats is not None and message.engine in self._position:
            self._metrics.gauges(
                message.engine,
                running=message.stats.get("num_running_reqs") or 0,
                waiting=message.stats.get("num_waiting_reqs") or 0,
                kv_usage=message.stats.get("kv_cache_usage") or 0.0,
            )
        if message.wave_complete is not None:
            self.finished_waves += 1
        if message.utility is not None:
            call_id, failure, result = message.utility
            future = self._calls.pop(call_id, None)
            if future is not None and not future.done():
                if failure:
                    future.set_exception(RuntimeError(failure))
                else:
                    future.set_result(result[1] if result else None)

    async def _read_stats(self, stats: zmq.asyncio.Socket) -> None:
        while True:
            frame = await stats.recv()
            try:
                counts, self._wave, self._group_running = wire.decode(frame)
                if counts is not None:
                    # The coordinator speaks of all ranks; these are ours.
                    self._balancer.counts_received([counts[rank] for rank in self._ranks if rank < len(counts)])
            except wire.MALFORMED as failure:
                logs.error(f"Dropped malformed counts: {type(failure).__name__}: {failure}")

    def _reader_ended(self, task: asyncio.Task[None]) -> None:
        """Nothing is heard any more, so nothing may go on waiting."""
        if not task.cancelled() and (failure := task.exception()) is not None:
            self.die(f"reading the engines' messages failed: {type(failure).__name__}: {failure}")

    def die(self, reason: str) -> None:
        """An engine is gone: fail what is under way and everything that comes."""
        if self.dead is not None:
            return
        logs.error(f"EngineDeadError: {reason}")
        self.dead = reason
        self.died.set()
        for pending in self._pending.values():
            pending.queue.put_nowait(EngineDeadError(reason))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        self._calls.clear()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for socket in (self._inputs, self._outputs, self._stats):
            if socket is not None:
                socket.close(linger=200)


def _delta_or_failure(item: list[Any]) -> Delta | Exception:
    """What one item of an engine's outputs says; a ValueError, which ends its request, when it says nothing readable."""
    try:
        tokens, finish = item[1], item[5] if len(item) > 5 else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise TypeError(f"no token ids: {str(tokens)[:100]}")
        return Delta(
            token_ids=tokens,
            finish=None if finish is None else FinishReason(finish),
            stop_reason=item[6] if len(item) > 6 else None,
            logprobs=unpack(item[2]) if len(item) > 2 and item[2] else None,
        )
    except wire.MALFORMED as failure:
        return ValueError(f"malformed output of an engine: {type(failure).__name__}: {failure}")
