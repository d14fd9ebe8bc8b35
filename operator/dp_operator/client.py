"""The few API calls the operator makes, over one aiohttp session. Objects are dictionaries, as the API sends them.

The official client's models drop fields they do not know and refuse ones that are newer than they are, and its
import costs much memory; docs/decisions/0002-own-api-client.md has the figures. kopf finds
the credentials; service account tokens are read again from their file, because they rotate.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from email.utils import parsedate_to_datetime
from typing import Any, Self

import aiohttp
import kopf
import msgspec

from dp_operator.api import API_VERSION, KIND, PLURAL
from dp_operator.naming import MANAGER

Object = dict[str, Any]

# kind -> (apiVersion, plural)
RESOURCES = {
    KIND: (API_VERSION, PLURAL),
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "ConfigMap": ("v1", "configmaps"),
    "StatefulSet": ("apps/v1", "statefulsets"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "Node": ("v1", "nodes"),
    "Event": ("events.k8s.io/v1", "events"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "PodGroup": ("", "podgroups"),  # of several gang schedulers: each manifest says its API group
}
_TIMEOUT = aiohttp.ClientTimeout(total=30, connect=10)
_PARALLEL_REQUESTS = 16
_PAGE = 500
_LOG_LINES = 4000
_CLOCK_TOLERANCE_S = 2.0
_LOG_BYTES = 1 << 20


class ApiError(Exception):
    """The API server said no. `status` is the HTTP code, `reason` its CamelCase reason, `retry_after_s` its advice."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class Client:
    """Calls to one API server. Use as an async context manager."""

    def __init__(self, *, user_agent: str = MANAGER) -> None:
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._connection = credentials()
        self._slots = asyncio.Semaphore(_PARALLEL_REQUESTS)
        # How far the API server's clock is ahead of ours; 0 where no more than an answer's way and its whole seconds.
        self.server_ahead_s = 0.0

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._connection.as_ssl_context(), limit=_PARALLEL_REQUESTS)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=_TIMEOUT, headers={"User-Agent": self._user_agent}
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Object | list[Object] | None = None,
        params: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send one request and decode the answer. Raises ApiError, aiohttp.ClientError or TimeoutError."""
        payload = await self._send(method, path, body=body, params=params, content_type=content_type)
        decoded: Object = msgspec.json.decode(payload)
        return decoded

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: Object | list[Object] | None = None,
        params: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        if self._session is None:
            raise RuntimeError("the client is not open")
        headers = {"Accept": "application/json", **credentials().as_http_headers()}
        if body is not None:
            headers["Content-Type"] = content_type
        async with (
            self._slots,
            self._session.request(
                method,
                f"{self._connection.server.rstrip('/')}{path}",
                params=params,
                headers=headers,
                data=None if body is None else msgspec.json.encode(body),
            ) as response,
        ):
            self.server_ahead_s = _ahead_s(response.headers.get("Date", ""), time.time())
            payload = await response.read()
            if response.status < 400:
                return payload
            raise _error(response, payload)

    async def list(self, kind: str, *, selector: str = "", namespace: str = "") -> list[Object]:
        """All objects of a kind, in pages. The API leaves kind and apiVersion out of list items; here they have them."""
        params = {"limit": str(_PAGE)} | ({"labelSelector": selector} if selector else {})
        items: list[Object] = []
        while True:
            page = await self.request("GET", path(kind, namespace), params=params)
            items += [{"apiVersion": RESOURCES[kind][0], "kind": kind} | item for item in page["items"]]
            token = page["metadata"].get("continue")
            if not token:
                return items
            params = params | {"continue": token}

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return await self.request("GET", path(kind, namespace, name))

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """POST; a misspelt field is an error, not a warning. A dry run is only looked at by the API server."""
        return await self.request(
            "POST",
            path(manifest["kind"], manifest["metadata"]["namespace"], version=manifest["apiVersion"]),
            body=manifest,
            params={"fieldValidation": "Strict", "fieldManager": MANAGER} | ({"dryRun": "All"} if dry_run else {}),
        )

    async def apply(self, manifest: Object) -> Object:
        """Server-side apply, forced. The manifest must carry metadata.uid, so that it never lands on a stranger."""
        meta = manifest["metadata"]
        return await self.request(
            "PATCH",
            path(manifest["kind"], meta["namespace"], meta["name"]),
            body=manifest,
            params={"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"},
            content_type="application/apply-patch+yaml",
        )

    async def take_over(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Make what we POSTed ours in the sense of server-side apply.

        Otherwise fields that a later intent leaves out would stay for ever: the POST owns them as an "Update". This
        is what client-go's csaupgrade does.
        """
        existing = await self.get(kind, namespace, name)
        meta = existing["metadata"]
        entries = meta.get("managedFields") or []
        posted = [e for e in entries if e.get("manager") == MANAGER and e.get("operation") == "Update"]
        applied = any(e.get("manager") == MANAGER and e.get("operation") == "Apply" for e in entries)
        if meta["uid"] != uid or applied or not posted:
            return
        posted[0]["operation"] = "Apply"
        change = [
            {"op": "replace", "path": "/metadata/managedFields", "value": entries},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
        ]
        await self.request(
            "PATCH", path(kind, namespace, name), body=change, content_type="application/json-patch+json"
        )

    async def delete(self, kind: str, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> Object:
        """DELETE this very object (uid), its dependents by the garbage collector. grace_s: instead of a pod's own."""
        options: Object = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        return await self.request("DELETE", path(kind, namespace, name), body=options)

    async def log(self, namespace: str, pod: str, *, previous: bool) -> str:
        """The end of the engine's log, at most _LOG_BYTES of it; previous: of the container before the last restart."""
        params = {"container": "engine", "tailLines": str(_LOG_LINES), "limitBytes": str(_LOG_BYTES)}
        answer = await self._send(
            "GET", f"{path('Pod', namespace, pod)}/log", params=params | ({"previous": "true"} if previous else {})
        )
        return answer.decode(errors="replace")

    async def replace(self, obj: Object) -> Object:
        """PUT a whole object; its resourceVersion is the precondition (409 otherwise)."""
        meta = obj["metadata"]
        return await self.request("PUT", path(obj["kind"], meta["namespace"], meta["name"]), body=obj)

    async def put_status(self, obj: Object) -> Object:
        """Replace the status of a custom resource; its resourceVersion is the precondition (409 otherwise)."""
        meta = obj["metadata"]
        return await self.request("PUT", f"{path(KIND, meta['namespace'], meta['name'])}/status", body=obj)


def path(kind: str, namespace: str = "", name: str = "", *, version: str = "") -> str:
    """URL path of a kind, a namespace's objects of it, or one object; version where the kind is not of one group."""
    usual, plural = RESOURCES[kind]
    version = version or usual
    parts = ["/api" if version == "v1" else "/apis", version]
    if namespace:
        parts += ["namespaces", namespace]
    return "/".join([*parts, plural, *([name] if name else [])])


def _ahead_s(date: str, now: float) -> float:
    """How far the clock that wrote a Date header is ahead; 0 within two seconds, or where there is no date."""
    try:
        gap = parsedate_to_datetime(date).timestamp() + 0.5 - now
    except ValueError:
        return 0.0
    return gap if abs(gap) > _CLOCK_TOLERANCE_S else 0.0


def _error(response: aiohttp.ClientResponse, payload: bytes) -> ApiError:
    try:
        status = json.loads(payload)
        reason, message = status.get("reason", ""), status.get("message", "")
    except (ValueError, AttributeError):
        reason, message = response.reason or "", payload.decode(errors="replace").strip()[:500]
        if response.status == 404:  # an answer of the API server's router, which knows no such path
            message = "the cluster has no such kind of object: is its CustomResourceDefinition installed?"
    retry_after = response.headers.get("Retry-After", "")
    return ApiError(response.status, reason, message, float(retry_after) if retry_after.isdigit() else None)


def credentials() -> kopf.ConnectionInfo:
    """Where the API server is and who we are, read anew: a service account's token rotates hourly.

    kopf names the server kubernetes.default.svc; the kubelet's variables give its address, so that an operator runs
    where cluster DNS does not (yet).
    """
    settings = kopf.OperatorSettings()
    found = kopf.login_with_service_account(settings=settings)
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if found and host:
        return dataclasses.replace(
            found, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        )
    found = found or kopf.login_with_kubeconfig(settings=settings)
    if not found:
        raise SystemExit("no credentials: run inside a pod with a service account, or set KUBECONFIG")
    return found
