"""The work queue under virtual time: many reasons make one visit, and nobody is visited twice at once."""

from __future__ import annotations

import asyncio

import pytest

from dp_operator.__main__ import STUCK_AFTER_S, health
from dp_operator.queue import LONGEST_RETRY_S, Queue

pytestmark = pytest.mark.looptime


def clock() -> float:
    return asyncio.get_running_loop().time()


async def test_many_reasons_make_one_visit():
    queue: Queue[str] = Queue()
    for _ in range(1000):
        queue.add("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_a_key_added_while_it_is_handled_is_handled_once_more_and_never_twice_at_once():
    queue: Queue[str] = Queue()
    queue.add("a")
    await queue.get()
    queue.add("a")
    queue.add("a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await queue.get()
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_a_delayed_key_comes_at_its_time_and_an_earlier_one_wins():
    queue: Queue[str] = Queue()
    start = clock()
    queue.add_after("a", 100)
    queue.add_after("a", 10)
    queue.add_after("a", 50)
    assert await queue.get() == "a"
    assert clock() - start == pytest.approx(10, abs=0.1)
    queue.done("a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(500):
            await queue.get()


async def test_adding_now_cancels_the_delayed_visit():
    queue: Queue[str] = Queue()
    queue.add_after("a", 10)
    queue.add("a")
    assert await queue.get() == "a"
    queue.done("a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await queue.get()


async def test_failures_back_off_per_key_up_to_a_limit_and_success_forgets_them():
    queue: Queue[str] = Queue()
    delays = [queue.retry("a") for _ in range(12)]
    assert delays[:3] == [0.25, 0.5, 1.0]
    assert delays[-1] == LONGEST_RETRY_S
    assert queue.retry("b") == 0.25
    queue.forget("a")
    assert queue.retry("a", at_least_s=7) == 7


async def test_the_api_servers_retry_after_is_honoured():
    queue: Queue[str] = Queue()
    start = clock()
    queue.retry("a", at_least_s=30)
    await queue.get()
    assert clock() - start >= 30


async def test_a_worker_that_hangs_inside_a_call_makes_the_operator_unhealthy_although_nothing_waits():
    queue: Queue[tuple[str, str]] = Queue()
    queue.add(("ns", "web"))
    key = await queue.get()
    assert health(queue).status == 200
    await asyncio.sleep(STUCK_AFTER_S + 1)
    assert health(queue).status == 503
    queue.done(key)
    assert health(queue).status == 200


async def test_keys_that_no_worker_takes_make_the_operator_unhealthy():
    queue: Queue[tuple[str, str]] = Queue()
    queue.add(("ns", "web"))
    assert health(queue).status == 200
    await asyncio.sleep(STUCK_AFTER_S + 1)
    assert health(queue).status == 503


async def test_failures_of_one_kind_do_not_run_up_the_back_off_of_another():
    """An API server that was away for long refuses something as it comes back; it was never asked for a minute."""
    queue: Queue[str] = Queue()
    delays = [queue.retry("a", at_most_s=3) for _ in range(2000)]
    assert delays[-1] == 3
    assert queue.retry("a") == 4
    assert [queue.retry("a") for _ in range(2000)][-1] == 60
