"""Every object that is made of the examples, and of templates and gangs, by server-side dry run with strict fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dp_operator import api, client, naming, preview, render

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENTS = [
    pytest.param(document, id=f"{path.stem}-{document['metadata']['name']}")
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    for document in preview.load(path.read_text())
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


@pytest.mark.parametrize("kind", ["Kueue", "Coscheduling", "Volcano"])
def test_pods_for_a_gang_scheduler_are_accepted(trial, kind):
    document = preview.load((EXAMPLES / "modes" / "hybrid.yaml").read_text())[0]
    document["spec"] |= {"scheduling": {"podGroup": kind}}
    for manifest in rendered(document):
        if manifest["kind"] in {"Pod", "StatefulSet"}:
            path = client.path(manifest["kind"], "default")
            manifest["metadata"]["namespace"] = "default"
            trial.server.call("POST", f"{path}?fieldValidation=Strict&dryRun=All", manifest)
