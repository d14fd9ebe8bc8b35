"""The chart against a real API server, as dry runs: nothing that another release installed is touched."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PATHS = {
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
}


def template(namespace, *settings):
    own = ROOT / ".cluster/bin/helm"
    binary = os.environ.get("HELM") or (str(own) if own.exists() else shutil.which("helm"))
    assert binary, "these tests need helm: set HELM, or run `make up`"
    chart = str(ROOT / "charts/dp-operator")
    # Two replicas, so that the Role for their Lease is there too.
    words = [word for setting in ("replicas=2", *settings) for word in ("--set", setting)]
    command = [binary, "template", "dp-operator", chart, "--namespace", namespace, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [item for item in yaml.safe_load_all(done.stdout) if item]


@pytest.fixture
def objects(namespace):
    return template(namespace)


@pytest.mark.parametrize("scope", ["all namespaces", "one namespace"])
def test_every_object_is_taken_without_an_unknown_field(server, namespace, scope):
    for item in template(namespace, *([f"watchNamespaces={{{namespace}}}"] if scope == "one namespace" else [])):
        path = PATHS[item["kind"]].format(namespace=namespace)
        query = "dryRun=All&fieldValidation=Strict&fieldManager=tests&force=true"
        stored = server.call(
            "PATCH",
            f"{path}/{item['metadata']['name']}?{query}",
            item,
            content_type="application/apply-patch+yaml",
        )
        assert stored["kind"] == item["kind"]


def test_the_operators_pod_may_run_where_pods_are_restricted(server, namespace, objects):
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    server.call("PATCH", f"/api/v1/namespaces/{namespace}", label, content_type="application/merge-patch+json")
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "dp-operator"}}
    server.call("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    (template,) = [item["spec"]["template"] for item in objects if item["kind"] == "Deployment"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": template["spec"]}
    query = "dryRun=All&fieldValidation=Strict"
    assert server.call("POST", f"/api/v1/namespaces/{namespace}/pods?{query}", pod)["spec"]["serviceAccountName"]
    del pod["spec"]["securityContext"]["seccompProfile"]
    with pytest.raises(Exception, match="violates PodSecurity"):
        server.call("POST", f"/api/v1/namespaces/{namespace}/pods?{query}", pod)
