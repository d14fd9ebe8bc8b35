"""One release of vLLM as the head of a group, without a model: its coordinator, handshake loop and client.

A case of `release.py`: `{"kind": "front_end", "size": 2, "moe": false, "port": 29550, "requests": 8}`. Everything that
speaks is vLLM's own code; here are only the stand-ins for its configuration and the questions asked. Prints one JSON
object a line: `{"listening": …}` when ranks may come, and at the end `{"result": …}` or `{"error": …}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq

DEADLINE_S = 60.0


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class ParallelConfig(SimpleNamespace):
    """The fields that the code under test reads; all ranks are remote."""

    def __init__(self, size: int) -> None:
        port, *spare = free_ports(5)
        super().__init__(
            data_parallel_size=size,
            data_parallel_size_local=0,
            data_parallel_rank=0,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            data_parallel_backend="mp",
            data_parallel_hybrid_lb=False,
            data_parallel_external_lb=False,
            data_parallel_master_ip="127.0.0.1",
            data_parallel_master_port=port,
            _data_parallel_master_port_list=spare,
            _coord_store_port=0,
            local_engines_only=False,
            enable_elastic_ep=False,
            elastic_ep_max_dp_size=size,
            enable_fault_tolerance=False,
            eplb_config=SimpleNamespace(num_redundant_experts=0),
        )

    def compute_hash(self) -> str:
        return "HASH"


def accepted(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this release's function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


class Stats:
    """Every message that the coordinator publishes to front ends."""

    def __init__(self, address: str) -> None:
        self.seen: list[list[Any]] = []
        self._address = address
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        subscriber = zmq.Context().socket(zmq.XSUB)
        subscriber.connect(self._address)
        subscriber.send(b"\x01")
        while True:
            self.seen.append(msgspec.msgpack.decode(subscriber.recv()))


class Head:
    """vLLM's parts of a head, put together as its launcher does."""

    def __init__(self, *, size: int, moe: bool, port: int, coordinator: dict[str, str] | None) -> None:
        """`coordinator`: endpoints of one that runs already, instead of vLLM's own."""
        from vllm.v1.engine import utils

        self.ranks = range(size)
        self.tells_counts = moe
        self.moe = moe
        self.parallel = ParallelConfig(size)
        self.cache = SimpleNamespace(num_gpu_blocks=None, block_size=16)
        self._own: Any = None
        endpoints = coordinator or self._start_coordinator()
        self.stats_address = endpoints["stats"]
        self.stats = Stats(self.stats_address)
        inputs, outputs = free_ports(2)
        self.addresses = utils.EngineZmqAddresses(
            inputs=[f"tcp://127.0.0.1:{inputs}"],
            outputs=[f"tcp://127.0.0.1:{outputs}"],
            coordinator_input=endpoints["engine_input"],
            coordinator_output=endpoints["engine_output"],
            frontend_stats_publish_address=self.stats_address,
        )
        self._router = zmq.Context().socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"tcp://127.0.0.1:{port}")
        self.failure: str | None = None
        self._handshake = threading.Thread(target=self._wait_for_engines, daemon=True)
        self._handshake.start()

    def _start_coordinator(self) -> dict[str, str]:
        from vllm.v1.engine.coordinator import DPCoordinator

        waves = accepted(DPCoordinator.__init__, {"enable_wave_coordination": self.moe})
        self._own = DPCoordinator(self.parallel, **waves)
        engine_input, engine_output = self._own.get_engine_socket_addresses()
        stats = self._own.get_stats_publish_address()
        return {"stats": stats, "engine_input": engine_input, "engine_output": engine_output}

    def _wait_for_engines(self) -> None:
        from vllm.v1.engine import utils

        arguments = {
            "handshake_socket": self._router,
            "addresses": self.addresses,
            "core_engines": [utils.CoreEngine(rank, local=False) for rank in self.ranks],
            "parallel_config": self.parallel,
            "coordinated_dp": self.moe,
            "cache_config": self.cache,
            "proc_manager": None,
            "coord_process": None,
            "launch": SimpleNamespace(
                engine_manager=None, coordinator=None, addresses=self.addresses, watched_frontend_processes=()
            ),
        }
        try:
            utils.wait_for_engine_startup(**accepted(utils.wait_for_engine_startup, arguments))
        except BaseException as failure:
            self.failure = f"{type(failure).__name__}: {failure}"
        finally:
            self._router.close()

    def client(self) -> Any:
        """vLLM's load-balancing client; returns when every rank's first frame has come."""
        from vllm.v1.engine.core_client import DPLBAsyncMPClient

        config = SimpleNamespace(
            parallel_config=self.parallel,
            cache_config=self.cache,
            model_config=SimpleNamespace(is_moe=self.moe, max_model_len=4096, multimodal_config=None),
            shutdown_timeout=0,
        )
        addresses = {
            "input_address": self.addresses.inputs[0],
            "output_address": self.addresses.outputs[0],
            "stats_update_address": self.stats_address,
        }
        return DPLBAsyncMPClient(config, None, False, addresses)

    def ready(self) -> bool:
        """Whether the handshake has ended well. Raises RuntimeError when it has failed."""
        self._handshake.join(DEADLINE_S)
        if self.failure:
            raise RuntimeError(self.failure)
        return not self._handshake.is_alive()

    def close(self) -> None:
        if self._own is not None:
            self._own.proc.kill()


def request(name: str, *, tokens: int, rank: int | None = None) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    fields = {
        "request_id": name,
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=tokens, ignore_eos=True),
        "pooling_params": None,
        "eos_token_id": 1,
        "arrival_time": time.time(),
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": rank,
    }
    return EngineCoreRequest(**accepted(EngineCoreRequest, fields))


class Answers:
    """What came back for each request."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.tokens: dict[str, int] = {}
        self.finished: dict[str, list[Any]] = {}

    async def until(self, names: list[str]) -> None:
        """Read outputs until all have finished. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while not all(name in self.finished for name in names):
                message = await self._client.get_output_async()
                for output in message.outputs:
                    name = output.request_id
                    self.tokens[name] = self.tokens.get(name, 0) + len(output.new_token_ids)
                    if output.finished:
                        reason = str(output.finish_reason)
                        self.finished[name] = [message.engine_index, self.tokens[name], reason]


async def until(condition: Any, what: str, within_s: float = 15.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(0.02)


async def converse(head: Any, client: Any, requests: int) -> dict[str, Any]:
    """Ask everything of `head.ranks`, the ranks that the client manages. Raises TimeoutError, AssertionError."""
    assert await asyncio.to_thread(head.ready)
    answers = Answers(client)
    result: dict[str, Any] = {"blocks": head.cache.num_gpu_blocks}
    if hasattr(client, "get_supported_tasks_async"):
        result["tasks"] = list(await client.get_supported_tasks_async())

    async def round_of(prefix: str, count: int) -> None:
        names = [f"{prefix}{number}" for number in range(count)]
        for name in names:
            await client.add_request_async(request(name, tokens=20))
        await answers.until(names)
        await until(lambda: not client.engines_running, "the group's pause")
        idle = [[0, 0]] * len(head.ranks)
        await until(lambda: [list(counts[:2]) for counts in client.lb_engines] == idle, f"zeros in {client.lb_engines}")

    await round_of("first", requests)
    wave_after_first = client.current_wave
    await round_of("second", requests)
    result["waves"] = [wave_after_first, client.current_wave]

    # A request for a named rank, which counts within what the client manages; then one that is aborted while it runs.
    last = len(head.ranks) - 1
    await client.add_request_async(request("chosen", tokens=3, rank=last))
    await answers.until(["chosen"])
    await client.add_request_async(request("endless", tokens=3000, rank=last))

    def counted() -> bool:
        seen = [counts for counts, _, _ in head.stats.seen[-3:] if counts]
        return not head.tells_counts or any(sum(counts[head.ranks[-1]][:2]) for counts in seen)

    await until(counted, "its count")
    await client.abort_requests_async(["endless"])
    with contextlib.suppress(TimeoutError):
        # vLLM's engines answer an abort or stay silent, by release.
        async with asyncio.timeout(1):
            await answers.until(["endless"])
    await until(lambda: not client.engines_running, "the group's pause after an abort")
    # A client of one rank keeps no record.
    result["in_flight"] = len(getattr(client, "reqs_in_flight", ()))

    utilities: dict[str, Any] = {}
    for method, arguments in (
        ("is_sleeping", []),
        ("reset_prefix_cache", []),
        ("sleep", [1]),
        ("is_sleeping", []),
        ("wake_up", [None]),
        ("nonsense", []),
    ):
        try:
            value = await asyncio.wait_for(client.call_utility_async(method, *arguments), 10)
        except Exception as failure:
            value = f"{type(failure).__name__}: {failure}"
        utilities.setdefault(method, []).append(value)
    result["utilities"] = utilities
    result["finished"] = answers.finished
    result["count_width"] = max((len(counts[0]) for counts, _, _ in head.stats.seen if counts), default=0)
    result["counted"] = any(counts and any(sum(each[:2]) for each in counts) for counts, _, _ in head.stats.seen)
    result["ran"] = any(running for _, _, running in head.stats.seen)
    return result


async def _converse(head: Head, requests: int) -> dict[str, Any]:
    return await converse(head, head.client(), requests)


def run(settings: dict[str, Any]) -> None:
    head = Head(
        size=settings["size"], moe=settings["moe"], port=settings["port"], coordinator=settings.get("coordinator")
    )
    say(listening=settings["port"])
    try:
        say(result=asyncio.run(_converse(head, settings["requests"])))
    except BaseException as failure:
        say(error=head.failure or f"{type(failure).__name__}: {failure}", trace=traceback.format_exc()[-3000:])
    finally:
        head.close()
