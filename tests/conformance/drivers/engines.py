"""One release of vLLM as all the engines of a group, without a model: its handshake, socket threads and busy loop.

A case of `release.py`: `{"kind": "engines", "mode": "internal", "moe": true, "ranks": [{"rank": 0, "handshake":
"tcp://127.0.0.1:29550", "own": null}, …]}`; `own` is where a rank of a hybrid or external group shakes hands with its
pod's front end. vLLM's own engine class is constructed and runs its own loop; replaced are the model with its scheduler
(one token a step for every request) and the all-reduce (ranks are threads here); the group for it is vLLM's own, joined
at the address and port that INIT names. Prints one JSON object a line: `{"met": rank, "store": port}`, `{"ready": rank}`, `{"finished": request, "rank": …, "tokens": …}`,
`{"aborted": request, "rank": …}`, `{"paused": wave, "rank": …}`. SIGUSR1 makes the last rank say that it is dead.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from types import MethodType, SimpleNamespace
from typing import Any

STEP_S = 0.002
# What of the parallel configuration decides where MoE ranks meet.
MEETING = (
    *("data_parallel_rank", "data_parallel_size", "data_parallel_master_ip", "data_parallel_master_port"),
    *("_data_parallel_master_port_list", "_coord_store_port"),
)
_printing = threading.Lock()


def say(**fields: Any) -> None:
    with _printing:
        print(json.dumps(fields), flush=True)


class Config(SimpleNamespace):
    """A part of vLLM's configuration; what is not set is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class RankConfig(Config):
    """vLLM's whole configuration of one rank, as far as engines without a model read it."""

    def __post_init__(self) -> None:
        """vLLM calls this after the handshake."""


def configuration(*, rank: int, mode: str, moe: bool, group: Group, lockstep: bool) -> RankConfig:
    parallel = Config(
        # A dense rank is an engine of its own since 0.14.
        data_parallel_size=group.size if lockstep else 1,
        data_parallel_rank=rank,
        data_parallel_index=rank,
        data_parallel_rank_local=rank,
        data_parallel_external_lb=mode == "external",
        data_parallel_hybrid_lb=mode == "hybrid",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        world_size=1,
        dp_sync_interval=16,
        enable_elastic_ep=False,
        enable_fault_tolerance=False,
        _coord_store_port=None,  # INIT brings it from 0.32 on
        compute_hash=lambda: "HASH",
        sync_dp_state=group.sync,
    )
    return RankConfig(
        parallel_config=parallel,
        cache_config=Config(num_gpu_blocks=128, block_size=16),
        model_config=Config(is_moe=moe, max_model_len=4096, dtype="torch.bfloat16", enable_sleep_mode=False),
        scheduler_config=Config(max_num_seqs=64, max_num_batched_tokens=2048, prefill_schedule_interval=1),
        instance_id=f"real-{rank}",
        shutdown_timeout=0,
    )


def meet(kind: Any, pipe: Any) -> None:
    """Join torch's group as vLLM does, in a process of one rank; `kind` is vLLM's class of parallel configurations."""
    parallel = Config(**pipe.recv())
    for name in ("get_next_dp_init_port", "_pick_stateless_dp_port"):
        if (method := getattr(kind, name, None)) is not None:
            setattr(parallel, name, MethodType(method, parallel))
    joined = kind.stateless_init_dp_group(parallel)
    pipe.send("met")
    with contextlib.suppress(EOFError):
        pipe.recv()
    del joined


class Group:
    """The all-reduce between ranks that are threads: a logical or."""

    def __init__(self, ranks: list[int], kind: Any) -> None:
        self.size = size = len(ranks)
        # Forked before there are threads.
        self.meetings: dict[int, Any] = {}
        fork = multiprocessing.get_context("fork")
        for rank in ranks:
            self.meetings[rank], theirs = fork.Pipe()
            fork.Process(target=meet, args=(kind, theirs), daemon=True).start()
        self._flags = [False] * size
        self._barrier = threading.Barrier(size)
        self._rank = threading.local()

    def enter(self, rank: int) -> None:
        self._rank.value = rank

    def any(self, mine: bool) -> bool:
        self._flags[self._rank.value] = mine
        self._barrier.wait()
        result = any(self._flags)
        self._barrier.wait()
        return result

    def sync(self, _group: Any = None, *, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        return self.any(has_unfinished), False


class Scheduler:
    """Every request gets a token a step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.requests: dict[str, list[Any]] = {}  # id: [request, tokens so far]
        self.pause_state = None

    def has_requests(self) -> bool:
        return bool(self.requests)

    has_unfinished_requests = has_requests

    def has_request(self, name: str) -> bool:
        return name in self.requests

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.requests), 0

    def get_kv_cache_usage(self) -> float:
        return min(1.0, len(self.requests) / 64)

    def get_kv_event_publisher_config(self) -> None:
        return None

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = [request, 0]

    def finish_requests(self, names: Any, _status: Any) -> list[Any]:
        for name in list(self.requests) if names is None else [names] if isinstance(names, str) else list(names):
            if self.requests.pop(name, None):
                say(aborted=name, rank=self.rank)
        return []


def without_model(core: Any, group: Group) -> None:
    """Replace what needs a model in this release's engine classes."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    try:
        from vllm.v1.core.sched.interface import PauseState
    except ImportError:
        unpaused = None
    else:
        unpaused = PauseState.UNPAUSED

    def start(self: Any, vllm_config: Any, *_: Any) -> None:
        self.vllm_config = vllm_config
        self.scheduler = Scheduler(self.engine_index)
        self.scheduler.pause_state = unpaused
        self.step_fn = lambda: step(self)
        self.batch_queue = None
        self.aborts_queue = queue.Queue()
        self.mm_receiver_cache = None
        self.model_executor = SimpleNamespace(is_sleeping=False, supported_tasks=("generate",))
        self._idle_state_callbacks = []

    def step(self: Any) -> tuple[dict[int, Any], bool]:
        if not self.scheduler.requests:
            return {}, False
        time.sleep(STEP_S)
        by_client: dict[int, list[Any]] = {}
        done: dict[int, set[str]] = {}
        for name, entry in list(self.scheduler.requests.items()):
            request, entry[1] = entry[0], entry[1] + 1
            last = entry[1] >= request.sampling_params.max_tokens
            output = EngineCoreOutput(name, [65 + entry[1] % 26], finish_reason=FinishReason.LENGTH if last else None)
            by_client.setdefault(request.client_index, []).append(output)
            if last:
                del self.scheduler.requests[name]
                done.setdefault(request.client_index, set()).add(name)
                say(finished=name, rank=self.engine_index, tokens=entry[1])
        return {
            client: EngineCoreOutputs(outputs=outputs, finished_requests=done.get(client))
            for client, outputs in by_client.items()
        }, True

    def pause_seen(self: Any, local_unfinished: bool) -> bool:
        wave = self.current_wave
        running = has_global(self, local_unfinished)
        if not running:
            say(paused=wave, rank=self.engine_index)
        return running

    def join(self: Any, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        self.dp_rank = parallel.data_parallel_rank
        self.dp_size = parallel.data_parallel_size
        if self.dp_size > 1:
            # vLLM's ranks meet where INIT says; what they reduce there they reduce here between threads.
            group.meetings[self.dp_rank].send({name: getattr(parallel, name) for name in MEETING})
            group.meetings[self.dp_rank].recv()
            say(met=self.dp_rank, store=parallel._coord_store_port)
        self.dp_group = group

    @contextlib.contextmanager
    def nothing(*_: Any, **__: Any) -> Any:
        yield None

    base, lockstep = core.EngineCore, core.DPEngineCoreProc
    base.__init__ = start
    base.preprocess_add_request = lambda _self, request: (request, request.current_wave)
    base.add_request = lambda self, request, request_wave=0: self.scheduler.add_request(request)
    base.post_step = lambda _self, _executed: None
    base.execute_dummy_batch = lambda _self: time.sleep(STEP_S)
    base.capture_iteration_details = nothing
    base.get_supported_tasks = lambda _self: ("generate",)
    base.is_sleeping = lambda _self: False
    has_global = lockstep._has_global_unfinished_reqs
    lockstep._has_global_unfinished_reqs = pause_seen
    lockstep._init_data_parallel = join
    core.ParallelConfig.has_unfinished_dp = staticmethod(lambda _group, unfinished: group.any(unfinished))
    core.ParallelConfig.sync_dp_state = staticmethod(group.sync)


def run_rank(core: Any, where: dict[str, Any], *, mode: str, moe: bool, group: Group, cores: dict[int, Any]) -> None:
    import vllm

    rank = where["rank"]
    group.enter(rank)
    # 0.11 knows no independent ranks.
    lockstep = moe or vllm.__version__.startswith("0.11")
    config = configuration(rank=rank, mode=mode, moe=moe, group=group, lockstep=lockstep)
    kind = core.DPEngineCoreProc if lockstep else core.EngineCoreProc
    more = {} if lockstep else {"engine_index": rank}
    beside_front_end = mode != "internal"
    engine = kind(config, beside_front_end, where["handshake"], None, True, where["own"], **more)
    cores[rank] = engine
    say(ready=rank)
    engine.run_busy_loop()


def run(settings: dict[str, Any]) -> None:
    from vllm.v1.engine import core

    ranks = settings["ranks"]
    group = Group([where["rank"] for where in ranks], core.ParallelConfig)
    without_model(core, group)
    cores: dict[int, Any] = {}

    def guarded(where: dict[str, Any]) -> None:
        try:
            run_rank(core, where, mode=settings["mode"], moe=settings["moe"], group=group, cores=cores)
        except BaseException as failure:
            say(
                error=f"rank {where['rank']}: {type(failure).__name__}: {failure}", trace=traceback.format_exc()[-3000:]
            )
            os._exit(1)

    for where in ranks:
        threading.Thread(target=guarded, args=(where,), daemon=True).start()
    signal.sigwait({signal.SIGUSR1})
    cores[len(ranks) - 1].output_queue.put_nowait(core.EngineCoreProc.ENGINE_CORE_DEAD)
    threading.Event().wait()
