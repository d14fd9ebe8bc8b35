"""A front end whose rank answers nonsense, twice at once, or no more: every request ends."""

import asyncio
import contextlib
import itertools

import pytest
import zmq
import zmq.asyncio
from aiohttp.test_utils import TestClient, TestServer

from dp_engine import wire
from dp_engine.client import EngineClient, EngineDeadError
from dp_engine.http_server import Server
from dp_engine.metrics import SharedMetrics
from dp_engine.options import parse_options
from dp_engine.versions import wire_of
from dp_engine.wire import Outputs

OPTIONS = parse_options(["m"])
FAMILY = wire_of(OPTIONS.version)
_names = itertools.count()


class Rank:
    """The other side of a front end's data sockets; it answers as a test says."""

    def __init__(self, context, inputs, outputs):
        self.requests = zmq.asyncio.Socket.from_socket(context.socket(zmq.DEALER))
        self.requests.identity = wire.identity(0)
        self.requests.connect(inputs)
        self.answers = context.socket(zmq.PUSH)
        self.answers.connect(outputs)

    async def next(self):
        """(kind, payload) of the next message."""
        return tuple(await asyncio.wait_for(self.requests.recv_multipart(), 5))

    async def added(self):
        kind, payload = await self.next()
        assert kind == wire.ADD
        return wire.decode_add(payload)

    def say(self, *outputs, **fields):
        self.answers.send(wire.encode_outputs(Outputs(engine=0, outputs=list(outputs), **fields), now=0.0))

    async def answer_call(self):
        kind, payload = await self.next()
        assert kind == wire.UTILITY
        self.say(utility=[wire.decode(payload)[1], None, [None, ["generate"]]])


@contextlib.asynccontextmanager
async def front_end(*, metrics=None):
    """(client, rank), connected to each other."""
    context = zmq.Context()
    shared = SharedMetrics(clients=1, engines=1, first_rank=0, family=FAMILY)
    names = [f"inproc://{next(_names)}" for _ in range(2)]
    inputs, outputs = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    inputs.bind(names[0])
    outputs.bind(names[1])
    client = EngineClient(
        ranks=[0], client=0, clients=1, waves=False, family=FAMILY, inputs=inputs, outputs=outputs, stats=None,
        metrics=metrics or shared.writer(0),
    )  # fmt: skip
    rank = Rank(context, *names)
    await rank.requests.send(b"")
    await asyncio.gather(client.connect(timeout_s=5), rank.answer_call())
    try:
        yield client, rank
    finally:
        client.close()
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def http(client):
    shared = SharedMetrics(clients=1, engines=1, first_rank=0, family=FAMILY)
    async with TestClient(TestServer(Server(client=client, options=OPTIONS, metrics=shared).application())) as caller:
        yield caller


async def collected(stream):
    return [token async for delta in stream for token in delta.token_ids]


async def test_two_requests_of_one_name_are_both_answered():
    async with front_end() as (client, rank):
        tasks = [asyncio.create_task(collected(client.generate("same", [1], {}, position=None))) for _ in range(2)]
        first, second = await rank.added(), await rank.added()
        assert first.request_id != second.request_id
        assert first.request_id.startswith("same-")
        rank.say([first.request_id, [7], None, None, None, 1], [second.request_id, [8], None, None, None, 1])
        assert sorted(await asyncio.wait_for(asyncio.gather(*tasks), 5)) == [[7], [8]]


BAD_ITEMS = {
    "tokens that are no list": [5],
    "tokens that are no numbers": [["a"]],
    "an unknown finish reason": [[1], None, None, None, 99],
    "log probabilities of another shape": [[1], 5],
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("item", BAD_ITEMS.values(), ids=list(BAD_ITEMS))
async def test_an_answer_that_cannot_be_read_ends_its_request_and_no_other(item, stream):
    async with front_end() as (client, rank), http(client) as caller:
        posting = asyncio.create_task(caller.post("/v1/completions", json={"prompt": "x", "stream": stream}))
        request = await rank.added()
        rank.say([request.request_id, *item])
        response = await asyncio.wait_for(posting, 5)
        text = await asyncio.wait_for(response.text(), 5)
        assert "malformed output" in text
        assert response.status == (200 if stream else 500)
        kind, payload = await rank.next()
        assert (kind, wire.decode(payload)) == (wire.ABORT, [request.request_id])
        assert (await caller.get("/health")).status == 200
        posting = asyncio.create_task(caller.post("/v1/completions", json={"prompt": "x"}))
        rank.say([(await rank.added()).request_id, [104], None, None, None, 1])
        response = await asyncio.wait_for(posting, 5)
        assert (await response.json())["choices"][0]["text"] == "h"


async def test_after_a_death_calls_end_at_once():
    async with front_end() as (client, rank):
        rank.answers.send(wire.ENGINE_CORE_DEAD)
        await asyncio.wait_for(client.died.wait(), 5)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(client.call(0, "pause_scheduler"), 5)


class BrokenWriter:
    """Metrics that cannot be written."""

    def gauges(self, *_args, **_kwargs):
        raise OSError("no space left")


async def test_a_front_end_that_hears_nothing_more_says_that_its_engines_are_dead():
    async with front_end(metrics=BrokenWriter()) as (client, rank):
        call = asyncio.create_task(client.call(0, "is_sleeping"))
        await rank.next()
        rank.say(stats={"num_running_reqs": 1})
        with pytest.raises(EngineDeadError, match="no space left"):
            await asyncio.wait_for(call, 5)
        assert client.dead is not None


async def test_nesting_deeper_than_python_follows_is_dropped_like_any_nonsense():
    async with front_end() as (client, rank):
        rank.answers.send(b"\x91" * 100_000)
        await asyncio.wait_for(asyncio.gather(client.call(0, "is_sleeping"), rank.answer_call()), 5)
        assert client.dead is None
