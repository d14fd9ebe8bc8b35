"""Leading under virtual time. The API server is a fake here (one object, versions, faults): real ones have no clock
that can be turned forward."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from dp_operator.client import ApiError
from dp_operator.lease import LEASE_DURATION_S, RENEW_WITHIN_S, Lease, Lost

pytestmark = pytest.mark.looptime


class OneLease:
    """An API server that knows one Lease."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.away = False
        self.silent = False
        self.answers_after_s = 0.0
        self.accepted_at = 0.0

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        self._answer()
        if self.silent:
            await asyncio.sleep(3600)
        if self.lease is None:
            raise ApiError(404, "NotFound", f"{kind} {namespace}/{name}")
        return copy.deepcopy(self.lease)

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists", "exists")
        return await self._store(manifest)

    async def replace(self, obj: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        assert self.lease
        if obj["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "somebody was faster")
        return await self._store(obj)

    def _answer(self) -> None:
        if self.away:
            raise TimeoutError("no answer")

    async def _store(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(obj)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        self.accepted_at = clock()
        await asyncio.sleep(self.answers_after_s)
        return self.lease


def lease(server: OneLease, identity: str) -> Lease:
    return Lease(server, namespace="dp-system", name="dp-operator", identity=identity)  # type: ignore[arg-type]


def clock() -> float:
    return asyncio.get_running_loop().time()


async def test_only_one_of_two_leads_and_the_other_follows_after_a_release():
    server = OneLease()
    first, second = lease(server, "a"), lease(server, "b")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    holding = asyncio.create_task(first.hold())
    await asyncio.sleep(300)
    assert not waiting.done()
    holding.cancel()
    await first.release()
    released = clock()
    await waiting
    assert clock() - released < 5


async def test_a_dead_leader_is_replaced_after_the_lease_duration():
    server = OneLease()
    await lease(server, "a").acquire()
    started = clock()
    await lease(server, "b").acquire()
    assert LEASE_DURATION_S <= clock() - started < LEASE_DURATION_S + 5


async def test_a_leader_that_cannot_renew_stops_before_anybody_else_may_begin():
    server = OneLease()
    leader = lease(server, "a")
    await leader.acquire()
    server.away = True
    started = clock()
    with pytest.raises(Lost, match="not renewed"):
        await leader.hold()
    assert RENEW_WITHIN_S <= clock() - started < LEASE_DURATION_S


@pytest.mark.parametrize("renewals", [0, 1])
async def test_a_leader_stops_in_time_when_the_answer_to_its_last_renewal_came_late(renewals):
    """Others count from when the API server accepted it; the answer may be seconds younger."""
    server = OneLease()
    server.answers_after_s = RENEW_WITHIN_S / 2 - 0.1
    leader = lease(server, "a")
    await leader.acquire()
    holding = asyncio.create_task(leader.hold())
    await asyncio.sleep(3 * renewals)
    assert server.version == 1 + renewals, "the renewal is with the API server, its answer is not here yet"
    server.silent = True
    with pytest.raises(Lost, match="not renewed"):
        await holding
    assert clock() - server.accepted_at <= RENEW_WITHIN_S


async def test_a_leader_whose_lease_was_taken_stops_at_once():
    server = OneLease()
    leader = lease(server, "a")
    await leader.acquire()
    assert server.lease
    server.lease["spec"]["holderIdentity"] = "b"
    with pytest.raises(Lost, match="b holds"):
        await leader.hold()


async def test_a_short_absence_of_the_api_server_is_survived():
    server = OneLease()
    leader = lease(server, "a")
    await leader.acquire()
    holding = asyncio.create_task(leader.hold())
    await asyncio.sleep(10)
    server.away = True
    await asyncio.sleep(4)
    server.away = False
    await asyncio.sleep(60)
    assert not holding.done()
    holding.cancel()


async def test_two_that_ask_at_the_same_moment_do_not_both_lead():
    server = OneLease()
    tasks = [asyncio.create_task(lease(server, name).acquire()) for name in "abc"]
    await asyncio.sleep(1)
    assert sum(task.done() for task in tasks) == 1
    for task in tasks:
        task.cancel()
