"""Streaming clients while their group is replaced on purpose."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.e2e.diary import Diary, Entry
from tests.e2e.kube import API_PORT, ENGINE_IMAGE, Space, dpd, until
from tests.e2e.page import show

STREAMS = 220
TOKENS, TOKENS_PER_S = 12, 2  # six seconds each
# Keeps STREAMS completions in flight, each on a connection of its own; a line of counts every half second. Once /tmp/stop
# is there, begins none any more and ends with those that run.
CLIENT = """
import asyncio, collections, json, os, sys, time
url, streams, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import aiohttp
counts = collections.Counter()
cuts = []
async def one(session):
    body = {"model": "example/tiny", "prompt": "Go on.", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    begun = False
    try:
        async with session.post(url, json=body) as answer:
            if answer.status != 200:
                counts["refused"] += 1
                return await asyncio.sleep(0.5)
            text = b""
            async for part in answer.content.iter_any():
                if not begun:
                    begun = True
                    counts["in_flight"] += 1
                text += part
        ended = text.endswith(b"data: [DONE]\\n\\n") and b'"finish_reason":"length"' in text.replace(b" ", b"")
        counts["finished" if ended else "cut"] += 1
        if not ended:
            cuts.append(text[-200:].decode(errors="replace"))
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        counts["cut" if begun else "refused"] += 1
        if begun:
            cuts.append(repr(error))
        await asyncio.sleep(0.5)
    finally:
        counts["in_flight"] -= begun
async def for_ever(session, delay):
    await asyncio.sleep(delay)
    while not os.path.exists("/tmp/stop"):
        await one(session)
async def say():
    while True:
        print(json.dumps({"at": time.time(), **counts}), flush=True)
        await asyncio.sleep(0.5)
async def main():
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        saying = asyncio.create_task(say())
        await asyncio.gather(*(for_ever(session, 6 * number / streams) for number in range(streams)))
        saying.cancel()
        print(json.dumps({"at": time.time(), **counts, "cuts": cuts[:5]}), flush=True)
asyncio.run(main())
"""


class Seen(NamedTuple):
    """What clients and the watch saw of one replacement."""

    way: str
    in_flight: int
    finished: int
    cut: int
    refused: int
    unserved_s: float


@pytest.fixture(scope="module")
def replacements() -> Iterator[list[Seen]]:
    seen: list[Seen] = []
    yield seen
    if len(seen) == 2:
        lines = [
            "| one group replaced | streams in flight when it began to go | finished during the test | cut | requests refused | without a serving group |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {s.way} | {s.in_flight} | {s.finished} | {s.cut} | {s.refused} | {s.unserved_s:.1f} s |" for s in seen
        ]
        show("streams", "\n".join(lines))


def client(space: Space, name: str) -> None:
    address = space.get("services", name)["spec"]["clusterIP"]
    url = f"http://{address}:{API_PORT}/v1/completions"
    container = {
        "name": "client",
        "image": ENGINE_IMAGE,
        "command": ["python3", "-c", CLIENT, url, str(STREAMS), str(TOKENS)],
    }
    space.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "client"},
            "spec": {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0},
        },
        "pods",
    )
    space.kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod/client", "--timeout=60s", timeout_s=70)


def counts(space: Space, *, tail: int = 1) -> list[Any]:
    return [json.loads(line) for line in space.kubectl("logs", "client", f"--tail={tail}").splitlines()]


@pytest.mark.parametrize("surge", [1, 0], ids=["with a successor first", "in place"])
def test_no_streaming_completion_is_cut_by_a_planned_replacement(
    space: Space, replacements: list[Seen], surge: int
) -> None:
    """llm-d#927/PR#2444, vllm#24885. With a successor first, no request is refused either."""
    args = ["--tokens-per-second", str(TOKENS_PER_S)]
    rollout = {"maxSurge": surge, "maxUnavailable": 1 - surge}
    drain = {"endpointSeconds": 2, "timeoutSeconds": 40}
    with Diary(space) as diary:
        space.create(dpd("streams", size=2, args=args, rollout=rollout, drain=drain))
        old = space.until_ready("streams")["groups"][0]["incarnation"]
        client(space, "streams")
        until(
            "all streams run",
            lambda: counts(space),
            lambda lines: lines[-1].get("in_flight", 0) >= STREAMS - 10,
            within_s=60,
        )
        generation = space.spec("streams", engine={"env": [{"name": "A", "value": "b"}]})["metadata"]["generation"]
        going = diary.first(
            "streams",
            "the old group goes",
            lambda entry: any(g["incarnation"] == old and g["state"] == "Stopping" for g in entry.groups),
            within_s=60,
        )
        diary.first(
            "streams",
            "only the new one is left and serves",
            lambda entry: entry.is_ready(generation=generation) and old not in {g["incarnation"] for g in entry.groups},
            within_s=120,
        )
        time.sleep(3)  # more requests, so that it is seen that the new group serves them
        space.kubectl("exec", "client", "--", "touch", "/tmp/stop")
        space.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/client", "--timeout=60s", timeout_s=70)
        entries = diary.entries("streams", since=going.at - 1)
    lines = counts(space, tail=-1)
    last = lines[-1]
    in_flight = max(line.get("in_flight", 0) for line in lines if abs(line["at"] - going.at) < 1.5)
    assert in_flight >= 200, f"only {in_flight} were in flight"
    replacements.append(
        Seen(
            "with a successor first (`maxSurge: 1`)" if surge else "in place (`maxUnavailable: 1`)",
            in_flight,
            last["finished"],
            last.get("cut", 0),
            last.get("refused", 0),
            unserved(entries),
        )
    )
    assert last.get("cut", 0) == 0, last
    if surge:
        assert last.get("refused", 0) == 0, last
        assert unserved(entries) == 0
    else:
        assert last["refused"] > 0, "nobody was there to serve them"
    assert last["finished"] > STREAMS


def unserved(entries: list[Entry]) -> float:
    """Seconds in which no group was ready."""
    total, since = 0.0, None
    for entry in entries:
        ready = entry.deployment["status"].get("readyReplicas", 0)
        if not ready and since is None:
            since = entry.at
        elif ready and since is not None:
            total, since = total + entry.at - since, None
    return total
