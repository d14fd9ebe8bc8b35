"""The cluster as the end-to-end tests see it.

Raw API calls, so that a test sees exactly what the server says; waiting that tells what it last saw; engines reached
through the API server's proxy, which works wherever the cluster runs; and the operator's calls out of the audit log.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import urllib3
from kubernetes import config

T = TypeVar("T")
Object = dict[str, Any]

LABELS = "dataparallel.io"
OPERATOR = "system:serviceaccount:dp-system:dp-operator"
ENGINE_IMAGE = "localhost/dp-engine:dev"
API_PORT, MONITOR_PORT = 8000, 13350
PREFIXES = {
    "pods": "/api/v1",
    "services": "/api/v1",
    "configmaps": "/api/v1",
    "secrets": "/api/v1",
    "events": "/api/v1",
    "statefulsets": "/apis/apps/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "endpointslices": "/apis/discovery.k8s.io/v1",
    "dataparalleldeployments": "/apis/dataparallel.io/v1alpha1",
}
MADE = ("pods", "statefulsets", "services", "configmaps", "poddisruptionbudgets", "networkpolicies")


class RefusedError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, answer: bytes) -> None:
        try:
            message = json.loads(answer)["message"]
        except (ValueError, KeyError, TypeError):
            message = answer.decode(errors="replace")[:500]
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def until(what: str, look: Callable[[], T], holds: Callable[[T], object] = bool, *, within_s: float) -> T:
    """Look until it holds. A refused or broken call and a field that is not there yet mean "not yet"."""
    deadline = time.monotonic() + within_s
    while True:
        late = time.monotonic() >= deadline
        seen: Any = "nothing"
        try:
            seen = look()
            if holds(seen):
                return seen  # type: ignore[no-any-return]
        except LookupError as error:
            seen = f"{error!r} while looking at {seen}"
        except (RefusedError, urllib3.exceptions.HTTPError) as error:
            seen = str(error)
        if late:
            text = seen if isinstance(seen, str) else json.dumps(seen, indent=1, default=str)
            raise AssertionError(f"{what}: not within {within_s:g} s. Last seen: {text}")
        time.sleep(0.1)


def dpd(
    name: str, *, size: int, faults: list[str] | None = None, args: list[str] | None = None, **changes: Any
) -> Object:
    """A small deployment of the stand-in engine that starts and ends fast; `changes` are merged into its spec."""
    words = ["--load-seconds", "0.1", *(args or [])]
    for fault in faults or []:
        words += ["--fault", fault]
    spec: Object = {
        "model": {"name": "example/tiny", "architecture": "Dense"},
        "engine": {"image": ENGINE_IMAGE, "version": "0.33", "args": words, "sharedMemory": "16Mi"},
        "dataParallel": {"size": size, "apiServerCount": 1},
        "devices": {"assignment": "None"},
        "drain": {"endpointSeconds": 0, "timeoutSeconds": 5},
    }
    _merge(spec, changes)
    return {
        "apiVersion": "dataparallel.io/v1alpha1",
        "kind": "DataParallelDeployment",
        "metadata": {"name": name},
        "spec": spec,
    }


def _merge(into: Object, changes: Object) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


class Cluster:
    """Calls to the API server as its administrator. Thread-safe."""

    def __init__(self, *, kubeconfig: Path, kubectl: Path) -> None:
        self._kubeconfig = kubeconfig
        self._kubectl = kubectl
        client = config.new_client_from_config(str(kubeconfig))
        self._host = client.configuration.host
        self._headers = {setting["key"]: setting["value"] for setting in client.configuration.auth_settings().values()}
        self._pool = client.rest_client.pool_manager
        self._pool.connection_pool_kw["maxsize"] = 32

    def raw(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        timeout_s: float = 20,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        answer = self._pool.request(
            method,
            self._host + path,
            headers=self._headers | {"Content-Type": content_type} | (headers or {}),
            body=None if body is None else json.dumps(body),
            timeout=timeout_s,
            retries=False,
        )
        if answer.status >= 300:
            raise RefusedError(answer.status, answer.data)
        data: bytes = answer.data
        return data

    def call(self, method: str, path: str, body: object = None, **options: Any) -> Any:
        return json.loads(self.raw(method, path, body, **options))

    def command(self, *args: str) -> list[str]:
        """A command line of kubectl."""
        return [str(self._kubectl), "--kubeconfig", str(self._kubeconfig), *args]

    def kubectl(self, *args: str, check: bool = True, timeout_s: float = 60) -> str:
        done = subprocess.run(self.command(*args), capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0 or not check, f"kubectl {' '.join(args)}: {done.stderr}{done.stdout}"
        return done.stdout + ("" if check else done.stderr)

    def nodes(self) -> list[str]:
        items = self.call("GET", "/api/v1/nodes")["items"]
        return [
            item["metadata"]["name"]
            for item in items
            if "node-role.kubernetes.io/control-plane" not in item["metadata"].get("labels", {})
        ]


class Call(NamedTuple):
    """One call of the operator, from the audit log."""

    at: float  # seconds since the epoch
    verb: str
    resource: str  # plural, with /status where it is that
    namespace: str
    name: str
    code: int


class Audit:
    """What the operator asked of the API server. The API server writes a line before it answers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mark(self) -> int:
        """Now, as a place in the log."""
        return self._path.stat().st_size

    def writes(self, since: int) -> list[Call]:
        """The operator's writes since a mark; a leader's Lease does not count, it is renewed for ever."""
        writing = ("create", "update", "patch", "delete", "deletecollection")
        return [call for call in self._calls(since) if call.verb in writing and call.resource != "leases"]

    def _calls(self, since: int) -> Iterator[Call]:
        with self._path.open("rb") as file:
            if self._path.stat().st_size >= since:  # else it has been rotated
                file.seek(since)
            for line in file:
                if OPERATOR.encode() not in line or not line.endswith(b"\n"):
                    continue
                event = json.loads(line)
                if event["user"]["username"] != OPERATOR:
                    continue
                ref = event.get("objectRef", {})
                subresource = f"/{ref['subresource']}" if ref.get("subresource") else ""
                yield Call(
                    at=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
                    verb=event["verb"],
                    resource=ref.get("resource", event["requestURI"]) + subresource,
                    namespace=ref.get("namespace", ""),
                    name=ref.get("name", ""),
                    code=event.get("responseStatus", {}).get("code", 0),
                )


class Space:
    """One namespace and the deployments in it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def path(self, plural: str, name: str = "") -> str:
        return f"{PREFIXES[plural]}/namespaces/{self.name}/{plural}" + (f"/{name}" if name else "")

    def create(self, manifest: Object, plural: str = "dataparalleldeployments") -> Any:
        return self.cluster.call("POST", f"{self.path(plural)}?fieldValidation=Strict", manifest)

    def get(self, plural: str, name: str) -> Any:
        return self.cluster.call("GET", self.path(plural, name))

    def find(self, plural: str, selector: str = "") -> list[Any]:
        items: list[Any] = self.cluster.call("GET", f"{self.path(plural)}?labelSelector={selector}")["items"]
        return items

    def delete(self, plural: str, name: str) -> None:
        self.cluster.call("DELETE", self.path(plural, name))

    def merge(self, plural: str, name: str, patch: Object) -> Any:
        return self.cluster.call("PATCH", self.path(plural, name), patch, content_type="application/merge-patch+json")

    def spec(self, name: str, **changes: Any) -> Any:
        """Change fields of a deployment's spec."""
        return self.merge("dataparalleldeployments", name, {"spec": changes})

    def kubectl(self, *args: str, **options: Any) -> str:
        return self.cluster.kubectl("--namespace", self.name, *args, **options)

    def status(self, name: str) -> Any:
        return self.get("dataparalleldeployments", name)["status"]

    def group(self, name: str, index: int = 0) -> Any:
        """The newest ledger entry of a group."""
        return [group for group in self.status(name)["groups"] if group["index"] == index][-1]

    def pods(self, name: str, *, group: int | None = None, role: str = "") -> Any:
        """Pods of a deployment by name."""
        selector = f"{LABELS}/name={name}"
        selector += f",{LABELS}/group={group}" if group is not None else ""
        selector += f",{LABELS}/role={role}" if role else ""
        return {pod["metadata"]["name"]: pod for pod in self.find("pods", selector)}

    def head(self, name: str, group: int = 0) -> Any:
        heads = self.pods(name, group=group, role="head")
        if len(heads) != 1:
            raise LookupError(f"heads of {name}: {list(heads)}")
        return next(iter(heads.values()))

    def until_ready(self, name: str, *, generation: int = 1, within_s: float = 90) -> Any:
        """The status once the deployment is Ready for this generation of its spec."""
        return until(
            f"{self.name}/{name} is Ready",
            lambda: self.status(name),
            lambda status: (
                condition(status, "Ready")["status"] == "True" and status["observedGeneration"] >= generation
            ),
            within_s=within_s,
        )

    def until_replaced(self, name: str, first: Any, *, within_s: float = 90) -> Any:
        """The group's entry once another incarnation than that of `first` serves."""
        return until(
            "another incarnation serves",
            lambda: self.group(name),
            lambda group: group["incarnation"] != first["incarnation"] and group["state"] == "Serving",
            within_s=within_s,
        )

    def snapshot(self, name: str, group: int = 0) -> Any:
        """What the relay of a group says."""
        pod = self.head(name, group)["metadata"]["name"]
        return self.cluster.call("GET", f"{self.path('pods', pod)}:{MONITOR_PORT}/proxy/v1/handshake")

    def complete(self, name: str, *, rank: int | None = None, port: int = API_PORT, **options: Any) -> Any:
        """One completion through the deployment's Service; `rank` asks for that rank to serve it."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        return self._complete(f"{self.path('services', name)}:{port}", headers=headers, **options)

    def complete_at(self, pod: str, port: int = API_PORT, **options: Any) -> Any:
        """One completion by one API server of a pod."""
        return self._complete(f"{self.path('pods', pod)}:{port}", **options)

    def _complete(self, address: str, *, model: str = "example/tiny", **options: Any) -> Any:
        body = {"model": model, "prompt": "Say something.", "max_tokens": 20, "ignore_eos": True}
        return self.cluster.call("POST", f"{address}/proxy/v1/completions", body, **options)

    def complete_many(self, name: str, count: int) -> list[Any]:
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda _: self.complete(name), range(count)))

    def served(self, name: str, group: int = 0) -> dict[int, int]:
        """Completions per rank, from the head's /metrics."""
        return self.served_at(self.head(name, group)["metadata"]["name"])

    def served_at(self, pod: str, port: int = API_PORT) -> dict[int, int]:
        """Completions per rank, from /metrics of one API server."""
        page = self.cluster.raw("GET", f"{self.path('pods', pod)}:{port}/proxy/metrics").decode()
        found: dict[int, int] = {}
        for line in page.splitlines():
            if line.startswith("vllm:request_success_total{"):
                rank = int(line.partition('engine="')[2].partition('"')[0])
                found[rank] = found.get(rank, 0) + int(float(line.rpartition(" ")[2]))
        return found

    def leftovers(self, uid: str) -> list[str]:
        """Everything in the namespace that was made for the deployment with this UID."""
        return [
            f"{plural}/{item['metadata']['name']}"
            for plural in MADE
            for item in self.find(plural)
            if item["metadata"].get("labels", {}).get(f"{LABELS}/uid") == uid
        ]

    def report(self) -> str:
        """All that helps to understand a failure."""
        commands = (
            ("get", "dpd", "-o", "yaml"),
            ("get", "pods", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", "--selector", f"{LABELS}/role", "--container", "engine", "--prefix", "--tail=15"),
            ("--namespace", "dp-system", "logs", "deployment/dp-operator", "--tail=40"),
        )
        parts = [f"$ kubectl {' '.join(args)}\n{self.kubectl(*args, check=False)}" for args in commands]
        for name, pod in self._heads():
            with contextlib.suppress(RefusedError, urllib3.exceptions.HTTPError):
                path = f"{self.path('pods', name)}:{MONITOR_PORT}/proxy/v1/handshake"
                parts.append(f"monitor of {name}: {self.cluster.raw('GET', path, timeout_s=3).decode()}")
            parts.append(f"status of {name}: {json.dumps(pod.get('status'))[:6000]}")
        return "\n".join(parts)

    def _heads(self) -> list[tuple[str, Any]]:
        with contextlib.suppress(RefusedError, urllib3.exceptions.HTTPError):
            return [(pod["metadata"]["name"], pod) for pod in self.find("pods", f"{LABELS}/role=head")]
        return []


class Film:
    """Every state that the objects of one kind in a namespace go through, as kubectl sees them; complete at the end."""

    def __init__(self, space: Space, plural: str) -> None:
        self.frames: list[Any] = []
        self._command = space.cluster.command("--namespace", space.name, "get", plural, "--watch", "--output=json")

    def __enter__(self) -> Self:
        self._file = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(self._command, stdout=self._file)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        with self._file:
            self._file.seek(0)
            text = self._file.read()
        decoder, at = json.JSONDecoder(), 0
        with contextlib.suppress(ValueError):  # the end, or an object that was not written to its end
            while True:
                frame, at = decoder.raw_decode(text, at)
                self.frames.append(frame)
                at += len(text[at:]) - len(text[at:].lstrip())


def condition(status: Any, kind: str) -> Any:
    (found,) = [condition for condition in status["conditions"] if condition["type"] == kind]
    return found


def identities(pods: Any) -> dict[str, tuple[str, int]]:
    """Pod name -> (uid, restarts of its containers): what no operator may change while it watches."""
    return {
        name: (
            pod["metadata"]["uid"],
            sum(
                container["restartCount"]
                for kind in ("initContainerStatuses", "containerStatuses")
                for container in pod["status"].get(kind, [])
            ),
        )
        for name, pod in pods.items()
    }


def engine_state(pod: Any) -> Any:
    """State of the engine container, as the kubelet reports it; empty before that."""
    for container in pod["status"].get("containerStatuses", []):
        if container["name"] == "engine":
            return container["state"]
    return {}
