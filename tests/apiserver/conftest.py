"""The CRD in a real API server, under an API group of this run alone: whatever else is installed stays as it is."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import config

from dp_operator import api

ROOT = Path(__file__).parents[2]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class RefusedError(Exception):
    """An answer other than 2xx: the server's message, and its causes as `field: message`."""

    def __init__(self, status: int, answer: bytes) -> None:
        try:
            said = json.loads(answer)
        except ValueError:  # a path that nothing serves is answered in plain text
            said = {"message": answer.decode()}
        super().__init__(f"{status}: {said['message']}")
        self.message = said["message"]
        self.causes = [
            f"{cause['field']}: {cause['message']}" for cause in (said.get("details") or {}).get("causes", [])
        ]


class ApiServer:
    """Raw calls, so that a test sees exactly what the server stores and says."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        api_client = config.new_client_from_config(kubeconfig)
        self._host = api_client.configuration.host
        self._headers = {"Accept": "application/json"}
        for setting in api_client.configuration.auth_settings().values():
            self._headers[setting["key"]] = setting["value"]
        self._pool = api_client.rest_client.pool_manager

    def call(self, method: str, path: str, body: object = None, *, content_type: str = "application/json") -> Any:
        answer = self._pool.request(
            method,
            self._host + path,
            headers=self._headers | {"Content-Type": content_type},
            body=None if body is None else json.dumps(body),
            timeout=20,
        )
        if answer.status >= 300:
            raise RefusedError(answer.status, answer.data)
        return json.loads(answer.data)

    def kubectl(self, *args: str) -> str:
        own = ROOT / ".cluster/bin/kubectl"
        command = [str(own) if own.exists() else "kubectl", "--kubeconfig", self.kubeconfig, *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def server() -> ApiServer:
    kubeconfig = os.environ.get("KUBECONFIG") or str(ROOT / ".cluster/kubeconfig")
    if not Path(kubeconfig).exists():
        pytest.fail(f"these tests need a Kubernetes API server, and {kubeconfig} does not exist: run `make up`")
    return ApiServer(kubeconfig)


@pytest.fixture(scope="session")
def crd(server: ApiServer) -> Iterator[dict[str, Any]]:
    """The CRD of `crds/` with its group replaced, established and served."""
    text = (ROOT / "crds" / "dataparallel.io_dataparalleldeployments.yaml").read_text()
    group = f"t{uuid.uuid4().hex[:8]}.dataparallel.test"
    body = yaml.safe_load(text)
    # Not everywhere in the text: rules speak of labels of the real group.
    body["metadata"]["name"] = f"{api.PLURAL}.{group}"
    body["spec"]["group"] = group
    path = f"{CRDS}/{body['metadata']['name']}"
    server.call("PATCH", f"{path}?fieldManager=tests&force=true", body, content_type="application/apply-patch+yaml")
    try:
        _await_served(server, path, f"/apis/{group}/{api.VERSION}/{api.PLURAL}")
        yield server.call("GET", path)
    finally:
        server.call("DELETE", path)


def _await_served(server: ApiServer, crd_path: str, list_path: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        seen = server.call("GET", crd_path).get("status", {}).get("conditions")
        try:
            server.call("GET", list_path)
        except RefusedError as refused:
            seen = f"{refused}, {seen}"
        else:
            return
        assert time.monotonic() < deadline, f"the CRD is not served after 30 s: {seen}"
        time.sleep(0.1)


@pytest.fixture
def namespace(server: ApiServer) -> Iterator[str]:
    name = f"crd-{uuid.uuid4().hex[:8]}"
    server.call("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    server.call("DELETE", f"/api/v1/namespaces/{name}")


class Dpds:
    """DataParallelDeployments of one namespace."""

    def __init__(self, server: ApiServer, *, group: str, namespace: str) -> None:
        self.server = server
        self.group = group
        self.namespace = namespace
        self.path = f"/apis/{group}/{api.VERSION}/namespaces/{namespace}/{api.PLURAL}"

    def body(self, case: dict[str, Any]) -> dict[str, Any]:
        """The smallest valid object with the changes of one case of data/*.yaml."""
        spec: dict[str, Any] = {
            "model": {"name": "org/model", "architecture": "Dense"},
            "engine": {"image": "engine:1"},
            "dataParallel": {"size": 8},
            "devices": {"assignment": "None"},
        }
        for path, value in copy.deepcopy(case.get("set") or {}).items():
            *parents, last = path.split(".")
            place = spec
            for parent in parents:
                place = place.setdefault(parent, {})
            if value is None:
                del place[last]
            else:
                place[last] = value
        if "fill_args" in case:
            spec["engine"]["args"] = ["x" * case["fill_length"]] * case["fill_args"]
        return {
            "apiVersion": f"{self.group}/{api.VERSION}",
            "kind": api.KIND,
            "metadata": {"name": case.get("name", "qwen")},
            "spec": spec,
        }

    def create(self, case: dict[str, Any], *, dry_run: bool = False) -> Any:
        query = "fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
        return self.server.call("POST", f"{self.path}?{query}", self.body(case))

    def refusal(self, case: dict[str, Any]) -> str:
        """What the server says against creating an object."""
        try:
            self.create(case, dry_run=True)
        except RefusedError as error:
            return error.message
        return "accepted"

    def causes(self, case: dict[str, Any]) -> list[str]:
        """Every reason of the server against creating an object, as `field: message`."""
        try:
            self.create(case, dry_run=True)
        except RefusedError as error:
            return error.causes
        return []

    def get(self, name: str, subresource: str = "") -> Any:
        return self.server.call("GET", f"{self.path}/{name}{subresource}")

    def merge(self, name: str, patch: dict[str, Any], subresource: str = "") -> Any:
        path = f"{self.path}/{name}{subresource}"
        return self.server.call("PATCH", path, patch, content_type="application/merge-patch+json")


@pytest.fixture
def dpds(server: ApiServer, crd: dict[str, Any], namespace: str) -> Dpds:
    return Dpds(server, group=crd["spec"]["group"], namespace=namespace)


@pytest.fixture(scope="session")
def trial(server: ApiServer, crd: dict[str, Any]) -> Dpds:
    """For dry runs, which leave nothing behind."""
    return Dpds(server, group=crd["spec"]["group"], namespace="default")
