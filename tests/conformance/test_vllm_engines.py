"""vLLM's engine class, of four releases, serves our front end: its handshake, its socket threads, its busy loop."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conformance.conftest import IMPORT_S, Api, Bed, Program, Release, until
from tests.conformance.report import Table
from tests.ports import free_port

START_S = 60.0


def our_head(bed: Bed, *, size: int, moe: bool, version: str, servers: int) -> tuple[Program, Api, int]:
    """`dp-engine serve` without ranks of its own, its API, and its rpc port."""
    port, rpc_port = free_port(), free_port()
    program = bed.engine(
        *("-dp", str(size), "-dpl", "0", "-dpa", "127.0.0.1", "-dpp", str(rpc_port)),
        *("--host", "127.0.0.1", "--port", str(port), "--api-server-count", str(servers)),
        *("--moe" if moe else "--no-moe", "--parallel-config-hash", "HASH"),
        version=version,
        name="head",
    )
    return program, Api(bed, port), rpc_port


def said(engines: Program, key: str) -> list[dict[str, Any]]:
    return [message for message in engines.messages() if key in message]


def paused(engines: Program, wave: int) -> set[int]:
    """Ranks that have ended this wave or a later one."""
    return {message["rank"] for message in said(engines, "paused") if message["paused"] >= wave}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_engines_of_vllm_serve_our_front_end(
    release: Release, bed: Bed, compatibility: Table, moe: bool, size: int, servers: int
) -> None:
    role = f"{size} engines of vLLM, led by our head with {servers} API server{'s' * (servers > 1)}"
    with compatibility.cell(role, release.name, moe=moe):
        head, api, rpc_port = our_head(bed, size=size, moe=moe, version=release.emulated, servers=servers)
        ranks = [{"rank": rank, "handshake": f"tcp://127.0.0.1:{rpc_port}", "own": None} for rank in range(size)]
        engines = release.case(bed, "engines", mode="internal", moe=moe, ranks=ranks)
        engines.message("ready", within_s=IMPORT_S)
        api.ready(within_s=START_S)
        everyone = set(range(size))
        lockstep = moe or release.name.startswith("0.11")
        # MoE ranks have met at the port that INIT names: since 0.32 they look for a store first, and we say 0, none.
        assert {message["met"] for message in said(engines, "met")} == (everyone if lockstep else set())
        stores = {message["store"] for message in said(engines, "met")}
        assert stores == ({0 if release.name in {"0.32.0", "0.33.0"} else None} if lockstep else set())

        with ThreadPoolExecutor(4 * size) as pool:
            assert set(pool.map(lambda _: api.complete(tokens=20), range(4 * size))) == {20}
        assert {message["rank"] for message in said(engines, "finished")} == everyone, "every rank answered"
        if lockstep:
            until(lambda: paused(engines, 0) == everyone, within_s=10, last=bed.logs)

        assert api.complete(tokens=7, rank=size - 1) == 7
        if not release.name.startswith("0.11"):  # the header came with 0.11.2
            assert said(engines, "finished")[-1]["rank"] == size - 1
        if lockstep:
            until(lambda: paused(engines, 1) == everyone, within_s=10, last=bed.logs)

        api.open_stream().close()
        until(lambda: said(engines, "aborted"), within_s=10, last=bed.logs)

        engines.signal(signal.SIGUSR1)
        until(lambda: not head.running(), within_s=15, last=bed.logs)
        assert bed.exit_code(head, within_s=5) == (0 if servers == 1 else 1)
