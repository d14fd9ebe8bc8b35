"""One malformed request, and a rank of vLLM hears nothing any more, on any input; so does ours."""

from __future__ import annotations

import pytest
import zmq

from dp_engine import wire
from tests.conformance.conftest import Bed, Release
from tests.conformance.front_ends import FrontEnds
from tests.conformance.report import Table

ANSWER_MS, SILENCE_MS = 20_000, 1500


@pytest.mark.parametrize("whose", ["ours", "vllm"])
def test_a_malformed_request_makes_all_inputs_deaf_and_leaves_the_process_up(
    release: Release, bed: Bed, compatibility: Table, whose: str
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    role = f"deaf on all inputs after a malformed request, process up: {'our rank' if whose == 'ours' else 'a rank of vLLM'}"
    try:
        with compatibility.cell(role, release.name, moe=None):
            front_ends = FrontEnds(context)
            handshake = f"tcp://127.0.0.1:{front_ends.rpc_port}"
            if whose == "ours":
                group = ("-dp", "1", "-dpa", "127.0.0.1", "-dpp", str(front_ends.rpc_port))
                rank = bed.engine("--headless", "--no-moe", *group, version=release.emulated)
            else:
                ranks = [{"rank": 1, "handshake": handshake, "own": None}]
                rank = release.case(bed, "engines", mode="internal", moe=False, ranks=ranks)
            [number] = front_ends.start(rank)
            for index in range(2):
                assert front_ends.answers(index, number, 70 + index, within_ms=ANSWER_MS), rank.log()
            front_ends.send(0, number, wire.ADD, b"\xc1")
            for index in range(2):
                assert not front_ends.answers(index, number, 80 + index, within_ms=SILENCE_MS), rank.log()
            assert rank.running(), rank.log()
    finally:
        context.destroy(linger=0)
