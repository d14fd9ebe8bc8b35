"""What the API client makes of answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler

from dp_operator import client
from dp_operator.plan import covers

PAGES = {
    None: {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "more"}},
    "more": {"items": [{"metadata": {"name": "b"}}], "metadata": {}},
}


async def test_listed_objects_are_like_those_of_a_watch_so_that_a_restart_repairs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "credentials", lambda: kopf.ConnectionInfo(server="https://api"))

    async def request(_: object, method: str, path: str, *, params: dict[str, str]) -> Any:
        assert (method, path) == ("GET", "/apis/policy/v1/namespaces/ns/poddisruptionbudgets")
        return PAGES[params.get("continue")]

    monkeypatch.setattr(client.Client, "request", request)
    found = await client.Client().list("PodDisruptionBudget", namespace="ns")
    assert [item["metadata"]["name"] for item in found] == ["a", "b"]
    intent = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "a"}}
    assert covers(found[0], intent)


async def test_a_kind_that_the_cluster_does_not_have_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gang scheduler that is not installed: the API server's router answers in plain text."""
    server = TestServer(web.Application())
    await server.start_server()
    try:
        monkeypatch.setattr(client, "credentials", lambda: kopf.ConnectionInfo(server=str(server.make_url("/"))))
        async with client.Client() as api:
            with pytest.raises(client.ApiError, match="is its CustomResourceDefinition installed"):
                await api.request("POST", "/apis/scheduling.volcano.sh/v1beta1/namespaces/ns/podgroups", body={})
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def asking(answer: Handler, path: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[client.Client]:
    """A client of a server that answers a GET of this path."""
    app = web.Application()
    app.router.add_get(path, answer)
    async with TestServer(app) as server:
        monkeypatch.setattr(client, "credentials", lambda: kopf.ConnectionInfo(server=str(server.make_url("/"))))
        async with client.Client() as api:
            yield api


async def test_how_long_an_overloaded_api_server_wants_to_be_left_alone_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        status = {"reason": "TooManyRequests", "message": "too many requests, please try again later"}
        return web.json_response(status, status=429, headers={"Retry-After": "7"})

    async with asking(refuse, "/api/v1/pods", monkeypatch) as api:
        with pytest.raises(client.ApiError) as refused:
            await api.list("Pod")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 7.0)


@pytest.mark.parametrize(("grace_s", "said"), [(None, {}), (5, {"gracePeriodSeconds": 5})])
async def test_only_the_very_object_is_deleted_with_its_own_grace_period_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch, grace_s: int | None, said: dict[str, int]
) -> None:
    monkeypatch.setattr(client, "credentials", lambda: kopf.ConnectionInfo(server="https://api"))
    options: dict[str, Any] = {}

    async def request(_: object, method: str, path: str, *, body: dict[str, Any]) -> Any:
        assert (method, path) == ("DELETE", "/api/v1/namespaces/ns/pods/p")
        options.update(body)

    monkeypatch.setattr(client.Client, "request", request)
    await client.Client().delete("Pod", "ns", "p", "uid-1", grace_s=grace_s)
    assert options == said | {
        "kind": "DeleteOptions",
        "apiVersion": "v1",
        "preconditions": {"uid": "uid-1"},
        "propagationPolicy": "Background",
    }


async def test_the_api_servers_clock_is_known_from_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times are what deadlines are compared with, whatever the clock of the operator's node says."""
    ahead_s = 0

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({}, headers={"Date": formatdate(time.time() + ahead_s, usegmt=True)})

    async with asking(answer, "/version", monkeypatch) as api:
        await api.request("GET", "/version")
        assert api.server_ahead_s == 0.0, "a second more or less is no difference"
        ahead_s = 600
        await api.request("GET", "/version")
        assert api.server_ahead_s == pytest.approx(600, abs=2)
        ahead_s = -600
        await api.request("GET", "/version")
        assert api.server_ahead_s == pytest.approx(-600, abs=2)
