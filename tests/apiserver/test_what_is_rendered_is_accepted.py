"""Every object that is made of the examples, and of templates and gangs, by server-side dry run with strict fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dp_operator import api, client, naming, preview, render, structural, versions
from tests.kinds_of_others import INFERENCE_POOL

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENTS = [
    pytest.param(document, id=f"{path.stem}-{document['metadata']['name']}")
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    for document in preview.load(path.read_text())
]
# What stands beside them in the same files.
OTHERS = [
    pytest.param(path, document, id=f"{path.stem}-{document['kind']}")
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if document["kind"] != api.KIND
]
SETTINGS = render.Settings(relay_image="relay:1")


def rendered(document: dict[str, Any]) -> list[dict[str, Any]]:
    cr = preview.check(document, version=None)
    inc = render.Incarnation(cr=cr, group=0, id="abcde", revision=naming.revision(cr.spec), settings=SETTINGS)
    return [*render.group_objects(inc, "10.96.0.9"), *render.kept_objects(cr, SETTINGS)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_an_example_is_accepted(trial, document):
    body = document | {"apiVersion": f"{trial.group}/{api.VERSION}"}
    trial.server.call("POST", f"{trial.path}?fieldValidation=Strict&dryRun=All", body)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_its_objects_are_accepted(trial, document):
    for manifest in rendered(document):
        path = client.path(manifest["kind"], "default", version=manifest["apiVersion"])
        manifest["metadata"]["namespace"] = "default"
        trial.server.call("POST", f"{path}?fieldValidation=Strict&dryRun=All", manifest)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_plan_of_an_example_has_nothing_against_it_but_the_advice_that_goes_with_its_mode(document):
    spec = preview.check(document, version=None).spec
    version = versions.known(spec) or versions.NEWEST_KNOWN
    said = preview.warnings(spec, name=document["metadata"]["name"], version=version)
    general = ("is assumed", "put a gateway", "kernels that share memory between the ranks of a node")
    assert [text for text in said if not any(words in text for words in general)] == []


@pytest.mark.parametrize(("path", "document"), OTHERS)
def test_what_stands_beside_an_example_is_accepted(trial, path, document):
    if document["kind"] == "InferencePool":
        assert document["apiVersion"] == "inference.networking.k8s.io/v1"
        assert list(structural.errors(INFERENCE_POOL, document["spec"], "spec")) == []
        return
    assert (document["apiVersion"], document["kind"]) == ("autoscaling/v2", "HorizontalPodAutoscaler")
    url = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers?fieldValidation=Strict&dryRun=All"
    trial.server.call("POST", url, document)
    target = document["spec"]["scaleTargetRef"]
    assert target["name"] in {other["metadata"]["name"] for other in preview.load(path.read_text())}
    assert (target["apiVersion"], target["kind"]) == (api.API_VERSION, api.KIND)


def test_the_pool_of_the_prefill_decode_pair_selects_its_serving_pods_at_a_port_that_they_have():
    path = EXAMPLES / "real" / "prefill-decode.yaml"
    pool = next(d for d in yaml.safe_load_all(path.read_text()) if d["kind"] == "InferencePool")["spec"]
    for document in preview.load(path.read_text()):
        (head,) = [manifest for manifest in rendered(document) if manifest["kind"] == "Pod"]
        assert pool["selector"]["matchLabels"].items() <= head["metadata"]["labels"].items()
        containers = [*head["spec"]["containers"], *head["spec"]["initContainers"]]
        ports = {port["containerPort"] for container in containers for port in container.get("ports", [])}
        assert {port["number"] for port in pool["targetPorts"]} <= ports


@pytest.mark.parametrize("kind", ["Kueue", "Coscheduling", "Volcano"])
def test_pods_for_a_gang_scheduler_are_accepted(trial, kind):
    document = preview.load((EXAMPLES / "modes" / "hybrid.yaml").read_text())[0]
    document["spec"] |= {"scheduling": {"podGroup": kind}}
    for manifest in rendered(document):
        if manifest["kind"] in {"Pod", "StatefulSet"}:
            path = client.path(manifest["kind"], "default")
            manifest["metadata"]["namespace"] = "default"
            trial.server.call("POST", f"{path}?fieldValidation=Strict&dryRun=All", manifest)
