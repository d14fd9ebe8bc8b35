"""vLLM's coordinator, handshake loop and client, of four releases, lead groups of our engines."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.component.handshake.play import RelayProcess, WorkerSet, make_plan
from tests.conformance.conftest import IMPORT_S, REPOSITORY, Bed, Release
from tests.conformance.report import Table
from tests.ports import free_port

REQUESTS = 6


def lead(
    release: Release, bed: Bed, *, moe: bool, size: int, relay: bool = False, coordinator: dict[str, str] | None = None
) -> dict[str, Any]:
    """One group from HELLO to the last answer; what vLLM's head saw. `coordinator`: ours, instead of its own."""
    with ExitStack() as stack:
        if relay:
            workers = [WorkerSet(name="g-w", replicas=1, first_rank=0, rank_stride=size)]
            plan = make_plan(size=size, size_local=size, head_placement="Dedicated", workers=workers)
            port, head_port = plan.rpc_port, plan.rpc_port + 1
        else:
            port = head_port = free_port()
        settings = {"size": size, "moe": moe, "port": head_port, "requests": REQUESTS, "coordinator": coordinator}
        head = release.case(bed, "front_end", **settings)
        head.message("listening", within_s=IMPORT_S)
        if relay:
            sidecar = RelayProcess(plan, bed.directory / "relay")
            stack.callback(sidecar.close)
            sidecar.check_in_all({"g-w-0": "127.0.0.1", plan.head_pod: "127.0.0.1"})
            sidecar.until(lambda snapshot: snapshot.listening_at is not None)
        bed.engine(
            *("--headless", "-dp", str(size), "-dpl", str(size), "-dpr", "0", "-dpa", "127.0.0.1", "-dpp", str(port)),
            *("--moe" if moe else "--no-moe", "--parallel-config-hash", "HASH", "--tokens-per-second", "200"),
            version=release.emulated,
        )
        return dict(head.message("result", within_s=IMPORT_S))


def check(
    result: dict[str, Any], *, ranks: range, release: str, moe: bool, counts: bool = True, requests: int = REQUESTS
) -> None:
    """What a user would miss, in the words of vLLM's own client. `counts`: ranks tell how busy they are."""
    finished = result["finished"]
    expected = {f"{prefix}{number}" for prefix in ("first", "second") for number in range(requests)}
    assert expected | {"chosen"} <= set(finished)
    for name in expected:
        assert finished[name][1] == 20
        assert finished[name][2] == "length"
    assert {finished[name][0] for name in expected} == set(ranks), "every rank answered"
    assert finished["chosen"][0] == ranks[-1]
    assert result["in_flight"] == 0
    in_waves = moe or release.startswith("0.11")
    if in_waves:
        first, second = result["waves"]
        assert 1 <= first < second
    else:
        assert result["waves"] == [0, 0]
    assert result["ran"] is in_waves
    # Dense engines between 0.14 and 0.26 tell nobody how busy they are.
    assert result["counted"] is (counts and (moe or release != "0.17.1"))
    width = 3 if release in {"0.32.0", "0.33.0"} else 2
    # Without counts of its ranks a coordinator publishes zeros every 5 s, which a short conversation may not see.
    assert result["count_width"] in ({width} if counts else {0, width})
    assert "generate" in result.get("tasks", ["generate"])
    utilities = result["utilities"]
    assert utilities["is_sleeping"] == [False, True]
    assert str(utilities["nonsense"][0]).startswith("Exception")


@pytest.mark.parametrize("relay", [False, True], ids=["direct", "relay"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_our_engines_serve_a_head_of_vllm(
    release: Release, bed: Bed, compatibility: Table, moe: bool, size: int, relay: bool
) -> None:
    role = f"{size} of our engines{' behind our relay' if relay else ''}, led by vLLM's head"
    with compatibility.cell(role, release.name, moe=moe):
        check(lead(release, bed, moe=moe, size=size, relay=relay), ranks=range(size), release=release.name, moe=moe)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_our_coordinator_serves_vllms_client(release: Release, bed: Bed, compatibility: Table, moe: bool) -> None:
    with compatibility.cell("our coordinator and engines, vLLM's handshake and client", release.name, moe=moe):
        program = bed.start(
            "coordinator",
            [sys.executable, str(Path(__file__).parent / "our_coordinator.py"), "3", release.emulated]
            + (["--moe"] if moe else []),
            {"PYTHONPATH": str(REPOSITORY / "engine_image"), "TMPDIR": str(bed.directory)},
        )
        endpoints = program.message("endpoints", within_s=20)
        result = lead(release, bed, moe=moe, size=3, coordinator=endpoints)
        check(result, ranks=range(3), release=release.name, moe=moe)
