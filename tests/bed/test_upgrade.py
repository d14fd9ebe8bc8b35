"""An operator that renders pods differently takes over from one that made them."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster import images
from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster
from tests.e2e.kube import Cluster, Space, dpd, identities, until

ROOT = Path(__file__).resolve().parents[2]
RENDERING = "operator/dp_operator/render/pods.py"
# Of every pod, of every container, and of the probe of every head.
CHANGES = {
    "GRACE_MARGIN_S = 10": "GRACE_MARGIN_S = 17",
    '"name": "engine",\n        "image"': '"name": "engine",\n        "workingDir": "/tmp",\n        "image"',
    '"periodSeconds": 1,': '"periodSeconds": 2,',
}


class Upgrade(NamedTuple):
    cluster: Cluster
    helm: list[str]
    tag: str

    def go(self) -> None:
        self._run(
            "upgrade", "dp-operator", str(ROOT / "charts/dp-operator"), "--reuse-values", f"--set=image.tag={self.tag}"
        )

    def back(self) -> None:
        self._run("rollback", "dp-operator")

    def _run(self, *words: str) -> None:
        argv = [*self.helm, *words, "--namespace=dp-system", "--wait", "--timeout=120s"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr

    def images(self) -> set[str]:
        pods = self.cluster.call("GET", "/api/v1/namespaces/dp-system/pods")["items"]
        return {pod["spec"]["containers"][0]["image"] for pod in pods if not pod["metadata"].get("deletionTimestamp")}


@pytest.fixture
def upgrade(bed: Bed | KindCluster, cluster: Cluster, tmp_path: Path) -> Iterator[Upgrade]:
    """Another build of the operator on every node; at the end the first one is back."""
    tag = f"changed-{uuid.uuid4().hex[:6]}"
    reference = f"{images.OPERATOR.reference.rpartition(':')[0]}:{tag}"
    context = tmp_path / "context"
    shutil.copytree(ROOT / "operator", context / "operator", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / ".dockerignore", context)
    source = (context / RENDERING).read_text()
    for old, new in CHANGES.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (context / RENDERING).write_text(source)
    images.ensure_variant(bed, reference, context)
    made = Upgrade(cluster, [str(bed.helm), f"--kubeconfig={bed.kubeconfig}"], tag)
    try:
        yield made
    finally:
        if made.images() == {reference}:
            made.back()
        for node in bed.nodes:
            bed.remove_image(reference, node_name=node)


def test_an_operator_that_renders_differently_touches_no_running_group(
    space: Space, upgrade: Upgrade, healthy: None
) -> None:
    space.create(dpd("runs", size=3, replicas=2))
    space.until_ready("runs")
    before = identities(space.pods("runs"))
    # Ready is said by the heads; the relay tells of the last rank a moment later.
    ledger = until(
        "the ledger has both groups serving",
        lambda: space.status("runs")["groups"],
        lambda groups: all(group["state"] == "Serving" for group in groups),
        within_s=30,
    )
    first = upgrade.images()
    for number, step in enumerate((upgrade.go, upgrade.back)):
        step()
        # A group made from now on shows which operator is at work, and that it has looked at everything.
        name = f"new-{number}"
        space.create(dpd(name, size=1))
        space.until_ready(name)
        grace = space.head(name)["spec"]["terminationGracePeriodSeconds"]
        assert grace == (5 + 17 if step == upgrade.go else 5 + 10)
        assert identities(space.pods("runs")) == before
        assert space.status("runs")["groups"] == ledger
        space.complete_many("runs", 4)
    assert upgrade.images() == first
    # A change of the spec is another matter: that is what brings the new rendering to a group.
    upgrade.go()
    space.spec("runs", replicas=1)
    until("group 1 is gone", lambda: space.pods("runs", group=1), lambda pods: not pods, within_s=30)
    kept = {name: one for name, one in before.items() if name.startswith("runs-0-")}
    assert identities(space.pods("runs")) == kept
