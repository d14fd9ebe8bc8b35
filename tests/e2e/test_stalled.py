"""Requests that run without making tokens are reported, and are no cause of a replacement."""

from __future__ import annotations

import contextlib
import threading

import urllib3

from tests.e2e.kube import API_PORT, RefusedError, Space, condition, dpd, identities, until


def test_a_rank_that_hangs_with_requests_is_reported_as_stalled_and_nothing_is_replaced(space: Space) -> None:
    """/health says 200 while an engine makes nothing any more (vllm#36960)."""
    args = ["--enable-fault-endpoint", "--tokens-per-second", "5"]
    space.create(dpd("stall", size=2, args=args, failurePolicy={"stalledSeconds": 10}))
    space.until_ready("stall")
    api = f"{space.path('services', 'stall')}:{API_PORT}/proxy"

    def running() -> float:
        page = space.cluster.raw("GET", f"{api}/metrics").decode()
        (line,) = [line for line in page.splitlines() if line.startswith('vllm:num_requests_running{engine="0"')]
        return float(line.rpartition(" ")[2])

    def ask() -> None:
        body = {"model": "example/tiny", "prompt": "x", "max_tokens": 2000, "ignore_eos": True}
        with contextlib.suppress(RefusedError, urllib3.exceptions.HTTPError):  # it ends with the test
            space.cluster.call(
                "POST", f"{api}/v1/completions", body, headers={"X-data-parallel-rank": "0"}, timeout_s=120
            )

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    until("rank 0 has a request", running, within_s=20)
    pods = identities(space.pods("stall"))
    assert condition(space.status("stall"), "ServingStalled")["status"] == "False"
    space.cluster.raw("POST", f"{api}/fault", {"fault": "hang:ranks=0"})
    found = until(
        "the stall is reported",
        lambda: condition(space.status("stall"), "ServingStalled"),
        lambda seen: seen["status"] == "True",
        within_s=60,
    )
    head = space.head("stall")["metadata"]["name"]
    assert found["reason"] == "NoTokens"
    assert f"rank 0 (pod {head} on " in found["message"]
    assert "rank 1" not in found["message"]
    assert identities(space.pods("stall")) == pods
    assert condition(space.status("stall"), "Ready")["status"] == "True"
    assert "lastFailures" not in space.group("stall")
