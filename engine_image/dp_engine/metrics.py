"""Prometheus metrics under vLLM's names and labels, in memory that all API servers of a head share.

Every API server writes only its own part; a scrape of any of them sums counters over all and takes the newest
gauge, so one scrape shows every rank whichever process answers it (vLLM merges through files to the same effect).
Which names there are depends on the release: `Wire.metric_names` says which of three sets (protocol notes §8).
"""

from __future__ import annotations

import mmap
import time
from typing import Literal

from msgspec import Struct

from dp_engine.versions import NEWEST_WIRE, Wire
from dp_engine.wire import BLOCK_SIZE, NUM_BLOCKS

Counter = Literal["prompt_tokens", "generation_tokens", "stop", "length", "abort", "error", "repetition"]
Histogram = Literal["time_to_first_token", "inter_token", "e2e_request", "prompt_size", "answer_size"]
Names = Literal["0.11", "0.17", "0.32"]

_REASONS: tuple[Counter, ...] = ("stop", "length", "abort", "error", "repetition")
_COUNTERS: tuple[Counter, ...] = ("prompt_tokens", "generation_tokens", *_REASONS)
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0)
_BOUNDS: dict[Histogram, tuple[float, ...]] = {
    "time_to_first_token": _SECONDS,
    "inter_token": _SECONDS,
    "e2e_request": _SECONDS,
    "prompt_size": _TOKENS,
    "answer_size": _TOKENS,
}
_HISTOGRAMS = tuple(_BOUNDS)
# What one API server knows of one rank: gauges and when they were written, sleep level and when that was, counters,
# then per histogram one slot per bound (not cumulative), count and sum.
_RUNNING, _WAITING, _KV_USAGE, _STAMP, _SLEEP, _SLEEP_STAMP = range(6)
_COUNTERS_AT = 6
_HISTOGRAMS_AT = _COUNTERS_AT + len(_COUNTERS)
_HISTOGRAM_SLOTS = len(_SECONDS) + 2
_SLOTS = _HISTOGRAMS_AT + len(_HISTOGRAMS) * _HISTOGRAM_SLOTS

_ALL: tuple[Names, ...] = ("0.11", "0.17", "0.32")
_OLD, _NEW = _ALL[:1], _ALL[1:]
# Samples of gauges and counters: (labels beyond engine and model_name, counter or slot; None: always 0).
Samples = tuple[tuple[dict[str, str], Counter | int | None], ...]
_NEVER: Samples = (({}, None),)

_PLAIN: tuple[tuple[str, str, str, tuple[Names, ...], Samples], ...] = (
    ("num_requests_running", "gauge", "Number of requests in model execution batches.", _ALL, (({}, _RUNNING),)),
    ("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", _ALL, (({}, _WAITING),)),
    (
        "num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason.",
        _ALL[2:],
        (({"reason": "capacity"}, _WAITING), ({"reason": "deferred"}, None)),
    ),
    ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", _ALL, (({}, _KV_USAGE),)),
    ("gpu_cache_usage_perc", "gauge", "KV-cache usage under its old name.", _OLD, (({}, _KV_USAGE),)),
    ("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache.", _ALL, _NEVER),
    ("prefix_cache_hits_total", "counter", "Tokens found in the prefix cache.", _ALL, _NEVER),
    ("gpu_prefix_cache_queries_total", "counter", "Prefix cache queries under their old name.", _OLD, _NEVER),
    ("gpu_prefix_cache_hits_total", "counter", "Prefix cache hits under their old name.", _OLD, _NEVER),
    ("prompt_tokens_total", "counter", "Number of prefill tokens processed.", _ALL, (({}, "prompt_tokens"),)),
    (
        "prompt_tokens_by_source_total",
        "counter",
        "Number of prompt tokens by source.",
        _NEW,
        (
            ({"source": "local_compute"}, "prompt_tokens"),
            ({"source": "local_cache_hit"}, None),
            ({"source": "external_kv_transfer"}, None),
        ),
    ),
    ("prompt_tokens_cached_total", "counter", "Number of cached prompt tokens.", _NEW, _NEVER),
    ("generation_tokens_total", "counter", "Generation tokens processed.", _ALL, (({}, "generation_tokens"),)),
    ("num_preemptions_total", "counter", "Cumulative number of preemption from the engine.", _ALL, _NEVER),
)
_HISTOGRAM_NAMES: tuple[tuple[str, str, tuple[Names, ...], Histogram], ...] = (
    ("time_to_first_token_seconds", "Time to first token in seconds.", _ALL, "time_to_first_token"),
    ("time_per_output_token_seconds", "Inter-token latency under its old name.", _OLD, "inter_token"),
    ("inter_token_latency_seconds", "Inter-token latency in seconds.", _ALL, "inter_token"),
    ("e2e_request_latency_seconds", "Latency of whole requests in seconds.", _ALL, "e2e_request"),
    ("request_prompt_tokens", "Number of prefill tokens of a request.", _ALL, "prompt_size"),
    ("request_generation_tokens", "Number of generation tokens of a request.", _ALL, "answer_size"),
)
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level


class SharedMetrics:
    """Make it before the API servers are forked; `clients` of them write, each at its own index.

    `engines` ranks from `first_rank` on, the ones that this node's front ends use.
    """

    def __init__(self, *, clients: int, engines: int, first_rank: int = 0, family: Wire = NEWEST_WIRE) -> None:
        self._first_rank = first_rank
        self._clients = clients
        self._engines = engines
        self._names = family.metric_names
        newer: dict[Counter, bool] = {"error": family.error_reason, "repetition": family.repetition_reason}
        self._reasons = tuple(reason for reason in _REASONS if newer.get(reason, True))
        self._memory = mmap.mmap(-1, clients * engines * _SLOTS * 8)
        self._values = memoryview(self._memory).cast("d")

    def writer(self, client: int) -> Writer:
        return Writer(self, client)

    def base(self, client: int, engine: int) -> int:
        return (client * self._engines + engine - self._first_rank) * _SLOTS

    def write(self, index: int, value: float) -> None:
        self._values[index] = value

    def add(self, index: int, value: float) -> None:
        self._values[index] += value

    def _sum(self, engine: int, slot: int) -> float:
        return sum(self._values[self.base(client, engine) + slot] for client in range(self._clients))

    def _newest(self, engine: int, slot: int, *, stamp: int) -> float:
        bases = [self.base(client, engine) for client in range(self._clients)]
        return self._values[max(bases, key=lambda base: self._values[base + stamp]) + slot]

    def _value(self, engine: int, source: Counter | int | None) -> float:
        if source is None:
            return 0.0
        if isinstance(source, int):
            return self._newest(engine, source, stamp=_STAMP)
        return self._sum(engine, _COUNTERS_AT + _COUNTERS.index(source))

    def render(self, *, model_name: str) -> str:
        """Everything in the Prometheus text format."""
        page = _Page(model_name)
        engines = range(self._first_rank, self._first_rank + self._engines)
        for name, kind, text, names, samples in _PLAIN:
            if self._names not in names:
                continue
            page.head(name, kind, text)
            for engine in engines:
                for labels, source in samples:
                    page.sample(name, engine, self._value(engine, source), **labels)
        page.head("request_success_total", "counter", "Count of successfully processed requests.")
        for engine in engines:
            for reason in self._reasons:
                page.sample("request_success_total", engine, self._value(engine, reason), finished_reason=reason)
        if self._names in _NEW:
            page.head("engine_sleep_state", "gauge", "1 for the state that the engine is in.")
            for engine in engines:
                level = self._newest(engine, _SLEEP, stamp=_SLEEP_STAMP)
                for number, state in enumerate(_SLEEP_STATES):
                    page.sample("engine_sleep_state", engine, float(number == level), sleep_state=state)
        for name, text, names, histogram in _HISTOGRAM_NAMES:
            if self._names not in names:
                continue
            page.head(name, "histogram", text)
            for engine in engines:
                self._histogram(page, name, engine, histogram)
        page.head("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
        for engine in engines:
            info = {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(NUM_BLOCKS), "cache_dtype": "auto"}
            page.sample("cache_config_info", engine, 1, **info)
        return page.text()

    def _histogram(self, page: _Page, name: str, engine: int, histogram: Histogram) -> None:
        slot, bounds = _histogram_slot(histogram), _BOUNDS[histogram]
        below = 0.0
        for position, bound in enumerate(bounds):
            below += self._sum(engine, slot + position)
            page.sample(f"{name}_bucket", engine, below, le=str(bound))
        count = self._sum(engine, slot + len(bounds))
        page.sample(f"{name}_bucket", engine, count, le="+Inf")
        page.sample(f"{name}_count", engine, count)
        page.sample(f"{name}_sum", engine, self._sum(engine, slot + len(bounds) + 1))


def _histogram_slot(histogram: Histogram) -> int:
    return _HISTOGRAMS_AT + _HISTOGRAMS.index(histogram) * _HISTOGRAM_SLOTS


class Writer(Struct, frozen=True):
    """One API server's part."""

    shared: SharedMetrics
    client: int

    def gauges(self, engine: int, *, running: int, waiting: int, kv_usage: float) -> None:
        base = self.shared.base(self.client, engine)
        for slot, value in ((_RUNNING, running), (_WAITING, waiting), (_KV_USAGE, kv_usage), (_STAMP, time.time())):
            self.shared.write(base + slot, value)

    def sleep_level(self, engine: int, level: int) -> None:
        """0: awake, 1: weights offloaded, 2: everything discarded."""
        base = self.shared.base(self.client, engine)
        self.shared.write(base + _SLEEP, level)
        self.shared.write(base + _SLEEP_STAMP, time.time())

    def count(self, engine: int, counter: Counter, amount: int = 1) -> None:
        self.shared.add(self.shared.base(self.client, engine) + _COUNTERS_AT + _COUNTERS.index(counter), amount)

    def observe(self, engine: int, histogram: Histogram, value: float) -> None:
        base = self.shared.base(self.client, engine) + _histogram_slot(histogram)
        bounds = _BOUNDS[histogram]
        bucket = next((position for position, bound in enumerate(bounds) if value <= bound), None)
        if bucket is not None:
            self.shared.add(base + bucket, 1)
        self.shared.add(base + len(bounds), 1)
        self.shared.add(base + len(bounds) + 1, value)


class _Page:
    """Lines of the text format; every name begins with vllm:, every sample carries engine and model_name."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._lines: list[str] = []

    def head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]

    def sample(self, name: str, engine: int, value: float, **labels: str) -> None:
        extra = "".join(f',{key}="{text}"' for key, text in labels.items())
        self._lines.append(f'vllm:{name}{{engine="{engine}",model_name="{self._model_name}"{extra}}} {float(value)}')

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"
