"""One operator at a time: a Lease that the leader renews and everybody else waits for.

Times are measured on this machine's monotonic clock from when a change of the Lease was *seen*, never compared with
times another machine wrote. A leader that cannot renew within its own limit stops before anybody else may begin:
renew_within < lease_duration, counted from when the last renewal was *sent*, for it may have counted from then on. Losing the Lease ends the process, because half of a hand-over is worse than a restart.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp

from dp_operator.client import ApiError, Client

log = logging.getLogger(__name__)

LEASE_DURATION_S = 15.0
RENEW_WITHIN_S = 10.0
RETRY_EVERY_S = 2.0


class Lost(Exception):  # noqa: N818
    """Somebody else leads now, or nobody can know."""


class Lease:
    """Hold the Lease `name` in `namespace` as `identity`."""

    def __init__(self, client: Client, *, namespace: str, name: str, identity: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._seen: tuple[str, str] | None = None  # holder and renewTime as last seen
        self._seen_at = 0.0
        self._renewed = 0.0  # when the last write that was accepted was sent

    async def acquire(self) -> None:
        """Wait until this process leads."""
        while not await self._guarded(self._try_acquire):  # noqa: ASYNC110 - the API server is asked, not an event
            await asyncio.sleep(RETRY_EVERY_S * random.uniform(1, 1.2))  # noqa: S311
        log.info("leading as %s", self._identity)

    async def hold(self) -> None:
        """Renew for ever; raises Lost when the renewing has failed for too long or somebody else has taken over."""
        loop = asyncio.get_running_loop()
        while True:
            limit = self._renewed + RENEW_WITHIN_S
            await asyncio.sleep(min(RETRY_EVERY_S, limit - loop.time()))
            if not await self._guarded(self._renew, until=limit) and loop.time() >= limit:
                raise Lost(f"the Lease was not renewed for {RENEW_WITHIN_S:.0f} s")

    async def release(self) -> None:
        """Let the next one begin at once."""
        try:
            async with asyncio.timeout(RETRY_EVERY_S):
                lease = await self._client.get("Lease", self._namespace, self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    await self._put(lease, holder="")
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("the Lease was not released: %s; the next leader waits %.0f s", error, LEASE_DURATION_S)

    async def _guarded(self, attempt: Callable[[], Awaitable[bool]], *, until: float = math.inf) -> bool:
        try:
            async with asyncio.timeout_at(min(asyncio.get_running_loop().time() + RENEW_WITHIN_S / 2, until)):
                return await attempt()
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("lease: %r", error)
            return False

    async def _try_acquire(self) -> bool:
        try:
            lease = await self._client.get("Lease", self._namespace, self._name)
        except ApiError as error:
            if error.status != 404:
                raise
            sent = asyncio.get_running_loop().time()
            await self._client.create(self._manifest())
            self._renewed = sent
            return True
        spec = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity):
            seen = (holder, spec.get("renewTime") or "")
            now = asyncio.get_running_loop().time()
            if seen != self._seen:
                self._seen, self._seen_at = seen, now
            if now - self._seen_at < LEASE_DURATION_S:
                return False
        await self._put(lease, holder=self._identity)
        return True

    async def _renew(self) -> bool:
        lease = await self._client.get("Lease", self._namespace, self._name)
        holder = lease["spec"].get("holderIdentity")
        if holder != self._identity:
            raise Lost(f"{holder or 'nobody'} holds the Lease now")
        await self._put(lease, holder=self._identity)
        return True

    async def _put(self, lease: dict[str, Any], *, holder: str) -> None:
        # The resourceVersion that was read is the precondition: of two, one gets 409.
        fresh = self._manifest()["spec"] | {"holderIdentity": holder}
        sent = asyncio.get_running_loop().time()
        await self._client.replace(lease | {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": fresh})
        self._renewed = sent

    def _manifest(self) -> dict[str, Any]:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(LEASE_DURATION_S),
                "acquireTime": at,
                "renewTime": at,
            },
        }
