"""Prometheus metrics under vLLM's names, in memory that all API servers of a head share.

Every API server writes only its own part; a scrape of any of them sums counters over all and takes the newest
gauge, so one scrape shows every rank whichever process answers it (vLLM merges through files to the same effect).
"""

from __future__ import annotations

import mmap
import time
from typing import Literal

from msgspec import Struct

from dp_engine.wire import BLOCK_SIZE, NUM_BLOCKS

Counter = Literal["prompt_tokens", "generation_tokens", "stop", "length", "abort", "error", "repetition"]
Histogram = Literal["time_to_first_token", "inter_token", "e2e_request"]

_REASONS: tuple[Counter, ...] = ("stop", "length", "abort", "error", "repetition")
_COUNTERS: tuple[Counter, ...] = ("prompt_tokens", "generation_tokens", *_REASONS)
_HISTOGRAMS: tuple[Histogram, ...] = ("time_to_first_token", "inter_token", "e2e_request")
_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAUGES = ("running", "waiting", "kv_usage")
_STAMP = len(_GAUGES)  # when the gauges were written
_COUNTERS_AT = _STAMP + 1
_HISTOGRAMS_AT = _COUNTERS_AT + len(_COUNTERS)
_HISTOGRAM_SLOTS = len(_BOUNDS_S) + 2  # one per bound (not cumulative), then count and sum
_SLOTS = _HISTOGRAMS_AT + len(_HISTOGRAMS) * _HISTOGRAM_SLOTS

_HISTOGRAM_NAMES = {
    "time_to_first_token": ("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds."),
    "inter_token": ("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds."),
    "e2e_request": ("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds."),
}


class SharedMetrics:
    """Make it before the API servers are forked; `clients` of them write, each at its own index.

    `engines` ranks from `first_rank` on, the ones that this node's front ends use.
    """

    def __init__(self, *, clients: int, engines: int, first_rank: int = 0) -> None:
        self._first_rank = first_rank
        self._clients = clients
        self._engines = engines
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

    def _newest_gauges(self, engine: int) -> list[float]:
        bases = [self.base(client, engine) for client in range(self._clients)]
        newest = max(bases, key=lambda base: self._values[base + _STAMP])
        return list(self._values[newest : newest + len(_GAUGES)])

    def render(self, *, model_name: str) -> str:
        """Everything in the Prometheus text format."""
        page = _Page(model_name)
        engines = range(self._first_rank, self._first_rank + self._engines)
        gauges = {engine: self._newest_gauges(engine) for engine in engines}
        for position, (name, text) in enumerate(
            [
                ("vllm:num_requests_running", "Number of requests in model execution batches."),
                ("vllm:num_requests_waiting", "Number of requests waiting to be processed."),
                ("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage."),
            ]
        ):
            page.head(name, "gauge", text)
            for engine in engines:
                page.sample(name, engine, gauges[engine][position])
        counters: dict[str, int] = {counter: _COUNTERS_AT + position for position, counter in enumerate(_COUNTERS)}
        for name, counter, text in (
            ("vllm:prompt_tokens_total", "prompt_tokens", "Number of prefill tokens processed."),
            ("vllm:generation_tokens_total", "generation_tokens", "Number of generation tokens processed."),
        ):
            page.head(name, "counter", text)
            for engine in engines:
                page.sample(name, engine, self._sum(engine, counters[counter]))
        page.head("vllm:request_success_total", "counter", "Count of successfully processed requests.")
        for engine in engines:
            for reason in _REASONS:
                value = self._sum(engine, counters[reason])
                page.sample("vllm:request_success_total", engine, value, finished_reason=reason)
        page.head("vllm:num_preemptions_total", "counter", "Cumulative number of preemption from the engine.")
        for engine in engines:
            page.sample("vllm:num_preemptions_total", engine, 0)
        for position, histogram in enumerate(_HISTOGRAMS):
            name, text = _HISTOGRAM_NAMES[histogram]
            page.head(name, "histogram", text)
            for engine in engines:
                self._histogram(page, name, engine, _HISTOGRAMS_AT + position * _HISTOGRAM_SLOTS)
        page.head("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
        for engine in engines:
            info = {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(NUM_BLOCKS), "cache_dtype": "auto"}
            page.sample("vllm:cache_config_info", engine, 1, **info)
        return page.text()

    def _histogram(self, page: _Page, name: str, engine: int, slot: int) -> None:
        below = 0.0
        for position, bound in enumerate(_BOUNDS_S):
            below += self._sum(engine, slot + position)
            page.sample(f"{name}_bucket", engine, below, le=str(bound))
        count = self._sum(engine, slot + len(_BOUNDS_S))
        page.sample(f"{name}_bucket", engine, count, le="+Inf")
        page.sample(f"{name}_count", engine, count)
        page.sample(f"{name}_sum", engine, self._sum(engine, slot + len(_BOUNDS_S) + 1))


class Writer(Struct, frozen=True):
    """One API server's part."""

    shared: SharedMetrics
    client: int

    def gauges(self, engine: int, *, running: int, waiting: int, kv_usage: float) -> None:
        base = self.shared.base(self.client, engine)
        for slot, value in enumerate((running, waiting, kv_usage, time.time())):
            self.shared.write(base + slot, value)

    def count(self, engine: int, counter: Counter, amount: int = 1) -> None:
        self.shared.add(self.shared.base(self.client, engine) + _COUNTERS_AT + _COUNTERS.index(counter), amount)

    def observe(self, engine: int, histogram: Histogram, seconds: float) -> None:
        base = self.shared.base(self.client, engine) + _HISTOGRAMS_AT + _HISTOGRAMS.index(histogram) * _HISTOGRAM_SLOTS
        bucket = next((position for position, bound in enumerate(_BOUNDS_S) if seconds <= bound), None)
        if bucket is not None:
            self.shared.add(base + bucket, 1)
        self.shared.add(base + len(_BOUNDS_S), 1)
        self.shared.add(base + len(_BOUNDS_S) + 1, seconds)


class _Page:
    """Lines of the text format; every sample carries engine and model_name."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._lines: list[str] = []

    def head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, engine: int, value: float, **labels: str) -> None:
        extra = "".join(f',{key}="{text}"' for key, text in labels.items())
        self._lines.append(f'{name}{{engine="{engine}",model_name="{self._model_name}"{extra}}} {float(value)}')

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"
