"""vLLM's own handshake loop with many remote ranks that other processes play.

A case of `release.py`: `{"kind": "handshake_cost", "size": 1024, "port": 29550}`. Prints `{"listening": port}`, and
when the last rank is READY `{"done": [monotonic seconds, CPU seconds since]}`.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import zmq
from front_end import ParallelConfig, accepted, say


def run(settings: dict[str, Any]) -> None:
    from vllm.v1.engine import utils

    size, port = settings["size"], settings["port"]
    router = zmq.Context().socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.RCVHWM, 0)
    router.bind(f"tcp://127.0.0.1:{port}")
    addresses = utils.EngineZmqAddresses(inputs=["tcp://127.0.0.1:1"], outputs=["tcp://127.0.0.1:2"])
    arguments = {
        "handshake_socket": router,
        "addresses": addresses,
        "core_engines": [utils.CoreEngine(rank, local=False) for rank in range(size)],
        "parallel_config": ParallelConfig(size),
        "coordinated_dp": False,
        "cache_config": SimpleNamespace(num_gpu_blocks=None),
        "proc_manager": None,
        "coord_process": None,
        "launch": SimpleNamespace(
            engine_manager=None, coordinator=None, addresses=addresses, watched_frontend_processes=()
        ),
    }
    say(listening=port)
    begun_s = time.process_time()
    utils.wait_for_engine_startup(**accepted(utils.wait_for_engine_startup, arguments))
    say(done=[time.monotonic(), time.process_time() - begun_s])
