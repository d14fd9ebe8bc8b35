"""vLLM's engine class, of four releases, serves our front end: its handshake, its socket threads, its busy loop."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conformance.conftest import IMPORT_S, Bed, Program, Release, free_port, until
from tests.conformance.report import Table

START_S = 30.0


class Head:
    """Our `dp-engine serve` without ranks of its own, and what its API says."""

    def __init__(self, bed: Bed, *argv: str, size: int, moe: bool, version: str, servers: int) -> None:
        self.bed, self.port, self.rpc_port = bed, free_port(), free_port()
        self.program = bed.engine(
            *("-dp", str(size), "-dpl", "0", "-dpa", "127.0.0.1", "-dpp", str(self.rpc_port)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--api-server-count", str(servers)),
            *("--moe" if moe else "--no-moe", "--parallel-config-hash", "HASH", *argv),
            version=version,
            name="head",
        )

    def call(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """(status, body); status 0 while nobody listens."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=START_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready(self) -> None:
        until(lambda: self.call("/health")[0] == 200, within_s=START_S, last=self.bed.logs)

    def complete(self, *, tokens: int, rank: int | None = None) -> int:
        """How many tokens came."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        body = {"model": "m", "prompt": "hi", "max_tokens": tokens}
        status, text = self.call("/v1/completions", body, headers)
        assert status == 200, f"{text}\n{self.bed.logs()}"
        return int(json.loads(text)["usage"]["completion_tokens"])

    def open_stream(self) -> Any:
        """A long answer of which the first bytes have come."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps({"model": "m", "prompt": "hi", "max_tokens": 4000, "stream": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        stream = urllib.request.urlopen(request, timeout=START_S)
        stream.read(1)
        return stream


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
        head = Head(bed, size=size, moe=moe, version=release.emulated, servers=servers)
        engines = release.case(bed, "engines", size=size, moe=moe, address=f"tcp://127.0.0.1:{head.rpc_port}")
        engines.message("ready", within_s=IMPORT_S)
        head.ready()
        everyone = set(range(size))
        lockstep = moe or release.name.startswith("0.11")

        with ThreadPoolExecutor(4 * size) as pool:
            assert set(pool.map(lambda _: head.complete(tokens=20), range(4 * size))) == {20}
        assert {message["rank"] for message in said(engines, "finished")} == everyone, "every rank answered"
        if lockstep:
            until(lambda: paused(engines, 0) == everyone, within_s=10, last=bed.logs)

        assert head.complete(tokens=7, rank=size - 1) == 7
        if not release.name.startswith("0.11"):  # the header came with 0.11.2
            assert said(engines, "finished")[-1]["rank"] == size - 1
        if lockstep:
            until(lambda: paused(engines, 1) == everyone, within_s=10, last=bed.logs)

        head.open_stream().close()
        until(lambda: said(engines, "aborted"), within_s=10, last=bed.logs)

        engines.signal(signal.SIGUSR1)
        until(lambda: not head.program.running(), within_s=15, last=bed.logs)
        assert bed.exit_code(head.program, within_s=5) == (0 if servers == 1 else 1)
