"""Hybrid and external groups: every pod has a front end, and ranks off the head's pod shake hands twice."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import IMPORT_S, REPOSITORY, Api, Bed, Program, Release, until
from tests.conformance.pods import MODES, Mode, Pods, Ports
from tests.conformance.report import Table
from tests.conformance.test_vllm_engines import START_S, paused, said
from tests.conformance.test_vllm_heads import check
from tests.ports import free_port

REQUESTS = 4


def works(release: Release, pods: Pods) -> bool:
    """Dense ranks that somebody else balances have had no coordinator since 0.14, and their front ends end for want of it."""
    return pods.mode == "hybrid" or pods.moe or release.name.startswith("0.11")


def ours(bed: Bed, script: str, *argv: str) -> Program:
    path = str(Path(__file__).parent / script)
    sockets = bed.directory / "s"
    sockets.mkdir(exist_ok=True)
    return bed.start(
        script, [sys.executable, path, *argv], {"PYTHONPATH": str(REPOSITORY / "engine_image"), "TMPDIR": str(sockets)}
    )


def announced(bed: Bed, node: Program, count: int) -> list[dict[str, Any]]:
    """Where the ranks of our pod should shake hands."""
    until(lambda: len(said(node, "engine")) == count, within_s=START_S, last=bed.logs)
    return [message["engine"] for message in said(node, "engine")]


def turn(bed: Bed, first: int) -> Path:
    return bed.directory / f"turn-{first}"


def vllm_pods(stack: ExitStack, release: Release, bed: Bed, pods: Pods, *, relay: bool) -> list[Program]:
    """Both pods with vLLM's front ends and our ranks."""
    ports = Ports(pods, relay=relay)
    nodes = []
    for first in pods.firsts:
        port = ports.others if first else ports.head
        settings = {"mode": pods.mode, "size": pods.size, "first": first, "local": pods.local, "moe": pods.moe}
        more = {"port": port, "requests": REQUESTS, "turn": str(turn(bed, first))}
        nodes.append(release.case(bed, "node", **settings, **more))
        wanted = nodes[-1].message("engines", within_s=IMPORT_S)
        if first == 0:
            ports.head_is_up(stack, bed)
        for rank in wanted["ranks"]:
            arguments = [*pods.arguments(first, port, release.emulated), "--tokens-per-second", "200"]
            ours(bed, "our_rank.py", str(rank), wanted["handshake"], wanted["own"] or "-", *arguments)
    return nodes


@pytest.mark.parametrize("relay", [False, True], ids=["direct", "relay"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_our_ranks_serve_in_pods_of_vllm(
    release: Release, bed: Bed, compatibility: Table, moe: bool, mode: Mode, relay: bool
) -> None:
    pods = Pods(mode, moe)
    if not works(release, pods):
        pytest.skip("see test_neither_serves_dense_models_that_somebody_else_balances")
    role = f"{mode}: our ranks{', behind our relay,' if relay else ''} in pods of vLLM"
    with compatibility.cell(role, release.name, moe=moe), ExitStack() as stack:
        nodes = vllm_pods(stack, release, bed, pods, relay=relay)
        for node in nodes:
            node.message("serving", within_s=START_S)
        results: dict[int, dict[str, Any]] = {}
        for first, node in reversed(list(zip(pods.firsts, nodes, strict=True))):
            turn(bed, first).touch()
            results[first] = dict(node.message("result", within_s=IMPORT_S))
        lockstep = moe or release.name.startswith("0.11")
        for first, result in results.items():
            ranks = range(first, first + pods.local)
            check(result, ranks=ranks, release=release.name, moe=moe, counts=mode == "hybrid", requests=REQUESTS)
            # The second pod asks first: the first pod hears of its waves from the coordinator alone.
            assert (result["wave_before"] > 0) is (lockstep and first == 0), result["wave_before"]


@pytest.mark.parametrize("relay", [False, True], ids=["direct", "relay"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_ranks_of_vllm_serve_in_our_pods(
    release: Release, bed: Bed, compatibility: Table, moe: bool, mode: Mode, relay: bool
) -> None:
    pods = Pods(mode, moe)
    if not works(release, pods):
        pytest.skip("see test_neither_serves_dense_models_that_somebody_else_balances")
    role = f"{mode}: ranks of vLLM{', behind our relay,' if relay else ''} in our pods"
    with compatibility.cell(role, release.name, moe=moe), ExitStack() as stack:
        ports = Ports(pods, relay=relay)
        nodes, apis, ranks = [], [], []
        for first in pods.firsts:
            api = Api(bed, free_port())
            serving = ["--host", "127.0.0.1", "--port", str(api.port), "--api-server-count", "1"]
            port = ports.others if first else ports.head
            node = ours(bed, "our_node.py", *pods.arguments(first, port, release.emulated), *serving)
            ranks += announced(bed, node, pods.local)
            nodes.append(node)
            apis.append(api)
            if first == 0:
                node.wait_for("Handshake socket bound", within_s=START_S)
                ports.head_is_up(stack, bed)
        assert [where["own"] is None for where in ranks] == [where["rank"] < pods.local for where in ranks]
        engines = release.case(bed, "engines", mode=mode, moe=moe, ranks=sorted(ranks, key=lambda where: where["rank"]))
        engines.message("ready", within_s=IMPORT_S)
        for api in apis:
            api.ready(within_s=START_S)

        everyone = set(range(pods.size))
        lockstep = moe or release.name.startswith("0.11")
        for number, (first, api) in enumerate(reversed(list(zip(pods.firsts, apis, strict=True)))):
            before = len(said(engines, "finished"))
            with ThreadPoolExecutor(8) as pool:
                assert set(pool.map(lambda _, api=api: api.complete(tokens=20), range(8))) == {20}
            finished = {message["rank"] for message in said(engines, "finished")[before:]}
            assert finished == set(range(first, first + pods.local)), "each pod's own ranks answer"
            if lockstep:  # in all pods
                until(lambda number=number: paused(engines, number) == everyone, within_s=10, last=bed.logs)

        engines.signal(signal.SIGUSR1)
        until(lambda: not nodes[-1].running(), within_s=15, last=bed.logs)
        assert bed.exit_code(nodes[-1], within_s=5) == 0
        assert apis[0].call("/health")[0] == 200, "a pod hears of its own ranks only"


@pytest.mark.parametrize("mode", ["external"])
def test_neither_serves_dense_models_that_somebody_else_balances(
    release: Release, bed: Bed, compatibility: Table, mode: Mode
) -> None:
    """What 0.14 and newer start without a coordinator ends with the first front end that asks for its address."""
    pods = Pods(mode, moe=False)
    if works(release, pods):
        pytest.skip("0.11 serves them")
    with ExitStack() as stack, ExitStack() as cells:
        for role in (
            *(f"external: our ranks{relay} in pods of vLLM" for relay in ("", ", behind our relay,")),
            *(f"external: ranks of vLLM{relay} in our pods" for relay in ("", ", behind our relay,")),
        ):
            cells.enter_context(compatibility.cell(role, release.name, moe=False, seen="neither"))
        for node in vllm_pods(stack, release, bed, pods, relay=False):
            until(lambda node=node: said(node, "error"), within_s=START_S, last=bed.logs)
            assert said(node, "error")[0]["error"].startswith("AssertionError")
        port = free_port()
        whole = []
        for first in pods.firsts:
            serving = ["--host", "127.0.0.1", "--port", str(free_port()), "--api-server-count", "1"]
            whole.append(
                bed.engine(*pods.arguments(first, port, release.emulated)[1:], *serving, version=release.emulated)
            )
        # The other pod ends for sure. It takes its rank along as soon as that is ready, at times before the rank has told
        # the head so, which then waits on.
        assert bed.exit_code(whole[-1], within_s=START_S) == 1
        assert "not their coordinator" in whole[-1].text()
