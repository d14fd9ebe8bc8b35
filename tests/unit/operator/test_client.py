"""What the API client makes of answers."""

from __future__ import annotations

from typing import Any

import kopf
import pytest

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
