"""One release of vLLM as a pod of a hybrid or external group, without a model: everything but the ranks is its own.

A case of `release.py`: `{"kind": "node", "mode": "external", "size": 2, "first": 1, "local": 1, "moe": true,
"port": 29550, "requests": 6, "turn": "/tmp/turn"}`. vLLM's own client launches: its sockets, with rank 0 the
coordinator and the handshake with the whole group, else the handshake with the pod's own ranks. Where it would start
processes of ranks it prints `{"engines": {"handshake": …, "own": …, "ranks": […]}}` instead; others play them. Then
`{"serving": true}`; asks when the file `turn` exists; at the end `{"result": …}` or `{"error": …}`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from types import SimpleNamespace
from typing import Any

from engines import Config
from front_end import ParallelConfig, Stats, converse, say, until

TURN_S = 90.0


def start_no_ranks(utils: Any) -> None:
    """Say where ranks should shake hands, where vLLM would start their processes."""

    class Elsewhere(utils.CoreEngineProcManager):  # type: ignore[name-defined,misc]
        def __init__(self, *_: Any, start_index: int, local_engine_count: int, **where: Any) -> None:
            self.processes: list[Any] = []
            ranks = list(range(start_index, start_index + local_engine_count))
            say(
                engines={
                    "handshake": where["handshake_address"],
                    "own": where["client_handshake_address"],
                    "ranks": ranks,
                }
            )

        def sentinels(self) -> list[Any]:
            return []

        def finished_procs(self) -> dict[str, int]:
            return {}

        def monitor_engine_liveness(self) -> None:
            threading.Event().wait()

        def close(self) -> None:
            pass

        def shutdown(self, timeout: float | None = None) -> None:
            pass

    utils.CoreEngineProcManager = Elsewhere


def configuration(settings: dict[str, Any]) -> Config:
    import vllm.config

    parallel = ParallelConfig(settings["size"])
    parallel.data_parallel_size_local = settings["local"]
    parallel.data_parallel_rank = parallel.data_parallel_index = settings["first"]
    parallel.data_parallel_external_lb = settings["mode"] == "external"
    parallel.data_parallel_hybrid_lb = settings["mode"] == "hybrid"
    parallel.data_parallel_rpc_port = settings["port"]
    parallel.local_engines_only = True
    config = Config(
        parallel_config=parallel,
        cache_config=SimpleNamespace(num_gpu_blocks=None, block_size=16),
        model_config=Config(is_moe=settings["moe"], max_model_len=4096),
        shutdown_timeout=0,
    )
    if (needs := getattr(vllm.config.VllmConfig, "needs_dp_coordinator", None)) is not None:
        config.needs_dp_coordinator = needs.fget(config)
    return config


class Node:
    """What `converse` asks about: the ranks of this pod and what the coordinator said."""

    def __init__(self, settings: dict[str, Any], config: Config, client: Any) -> None:
        self.ranks = range(settings["first"], settings["first"] + settings["local"])
        # vLLM's ranks keep their counts to themselves when somebody else balances.
        self.tells_counts = settings["moe"] and settings["mode"] == "hybrid"
        self.cache = config.cache_config
        self.stats = Stats(client.stats_update_address)

    def ready(self) -> bool:
        """The client does not return before its handshake has ended."""
        return True


async def serve(settings: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.engine.core_client import EngineCoreClient

    config = configuration(settings)
    client = EngineCoreClient.make_async_mp_client(config, None, False)
    node = Node(settings, config, client)
    say(serving=True)
    await until(lambda: os.path.exists(settings["turn"]), "its turn", TURN_S)
    wave = client.current_wave
    return {**await converse(node, client, settings["requests"]), "wave_before": wave}


def run(settings: dict[str, Any]) -> None:
    from vllm.v1.engine import utils

    start_no_ranks(utils)
    try:
        say(result=asyncio.run(serve(settings)))
    except BaseException as failure:
        say(error=f"{type(failure).__name__}: {failure}", trace=traceback.format_exc()[-3000:])
    threading.Event().wait(TURN_S)  # the coordinator of rank 0's pod serves the others
