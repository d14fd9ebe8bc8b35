"""What /metrics says about ranks that have requests and make no token."""

from __future__ import annotations

from typing import Any

from dp_handshake.messages import LaunchPlan
from dp_handshake.tokens import MAX_STALLS, Watch, counts, urls

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 10.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+02
vllm:generation_tokens_total{engine="1",model_name="m"} 3.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
"""


def busy(ranks: range, tokens: int, *, running: int = 1) -> str:
    return "\n".join(
        f'vllm:num_requests_running{{model_name="m",engine="{rank}"}} {running}\n'
        f'vllm:generation_tokens_total{{model_name="m",engine="{rank}"}} {tokens}'
        for rank in ranks
    )


def test_a_page_of_metrics_is_read_by_rank() -> None:
    assert counts(PAGE) == {0: (2.0, 160.0), 1: (0.0, 3.0)}


def test_a_rank_stalls_from_its_last_token_on_until_the_next_one_or_until_nobody_waits() -> None:
    watch = Watch()
    watch.take(counts(busy(range(2), 5)), now=100.0)
    assert watch.stalls == [], "one look tells nothing"
    watch.take(counts(busy(range(1), 5) + "\n" + busy(range(1, 2), 6)), now=110.0)
    assert [(stall.rank, stall.since) for stall in watch.stalls] == [(0, 100.0)]
    watch.take(counts(busy(range(1), 5) + "\n" + busy(range(1, 2), 7)), now=120.0)
    assert [(stall.rank, stall.since) for stall in watch.stalls] == [(0, 100.0)], "the time is that of the last token"
    watch.take(counts(busy(range(2), 8)), now=130.0)
    assert watch.stalls == []
    watch.take(counts(busy(range(2), 8)), now=140.0)
    watch.take(counts(busy(range(2), 8, running=0)), now=150.0)
    assert watch.stalls == []


def test_a_rank_that_cannot_be_looked_at_is_not_said_to_stall_and_its_past_is_not_forgotten() -> None:
    watch = Watch()
    for now in (100.0, 110.0):
        watch.take(counts(busy(range(2), 5)), now=now)
    watch.take(counts(busy(range(1), 5)), now=120.0)
    assert [stall.rank for stall in watch.stalls] == [0]
    watch.take({}, now=130.0)
    assert watch.stalls == [], "the page of nobody was read"
    watch.take(counts(busy(range(2), 5)), now=140.0)
    assert [(stall.rank, stall.since) for stall in watch.stalls] == [(0, 100.0), (1, 100.0)], "not one token came"


def test_what_is_told_of_a_large_group_is_bounded() -> None:
    watch = Watch()
    for now in (1.0, 2.0):
        watch.take(counts(busy(range(500), 5)), now=now)
    assert [stall.rank for stall in watch.stalls] == list(range(MAX_STALLS))


def plan(**changes: Any) -> LaunchPlan:
    fields: dict[str, Any] = {
        "name": "g",
        "group": 0,
        "incarnation": "abcde",
        "size": 4,
        "size_local": 2,
        "load_balancing": "Internal",
        "head_placement": "Colocated",
        "architecture": "MoE",
        "head_pod": "g-head",
        "workers": [],
        "monitor_host": "198.19.0.1",
        "rpc_port": 13345,
        "api_port": 8000,
        "head_argv": [],
        "worker_argv": [],
    }
    return LaunchPlan(**{**fields, **changes})


def test_an_internal_head_is_asked_for_all_ranks_and_elsewhere_every_api_for_its_own() -> None:
    ips = ["198.18.0.1", "198.18.0.2"]
    assert urls(plan(), ips[0], ips) == ["http://198.18.0.1:8000/metrics"]
    hybrid = plan(load_balancing="Hybrid", api_scheme="HTTPS")
    assert urls(hybrid, ips[0], ips) == ["https://198.18.0.1:8000/metrics", "https://198.18.0.2:8000/metrics"]
    supervised = plan(load_balancing="External", health_port=9256)
    assert urls(supervised, ips[0], ips)[:2] == ["http://198.18.0.1:8000/metrics", "http://198.18.0.1:8001/metrics"]
    assert len(urls(supervised, ips[0], ips)) == 4
    assert urls(plan(), "fd00::1", ["fd00::1"]) == ["http://[fd00::1]:8000/metrics"]
