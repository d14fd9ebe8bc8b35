"""What the gang schedulers want to see of the pods of a group. Pure.

* Volcano: a PodGroup (`scheduling.volcano.sh/v1beta1`), its name as annotation of each pod, `schedulerName: volcano`.
* Coscheduling (scheduler-plugins): a PodGroup (`scheduling.x-k8s.io/v1alpha1`), its name as label of each pod. The
  scheduler that runs the plugin has the name that its administrator gave it: write it in template.
* Kueue: no object, but labels and annotations of each pod; the queue is named by the label
  `kueue.x-k8s.io/queue-name`, which is yours to set in template.

The pods of one incarnation are one gang: all of them or none.
"""

from __future__ import annotations

from typing import Any

from dp_operator.api import Spec
from dp_operator.render.base import Incarnation, Manifest, meta
from dp_operator.render.shape import pods

VOLCANO_API = "scheduling.volcano.sh/v1beta1"
COSCHEDULING_API = "scheduling.x-k8s.io/v1alpha1"


def pod_group(inc: Incarnation) -> Manifest | None:
    """The PodGroup of an incarnation, if its gang scheduler has such objects."""
    kind = inc.cr.spec.scheduling.pod_group
    spec: dict[str, Any] = {"minMember": pods(inc.cr.spec)}
    if kind == "Volcano":
        return {"apiVersion": VOLCANO_API, "kind": "PodGroup", "metadata": meta(inc, inc.base), "spec": spec}
    if kind == "Coscheduling":
        # The plugin's own patience; ours gives the nodes back after the same time.
        spec["scheduleTimeoutSeconds"] = inc.cr.spec.startup.schedule_timeout_seconds
        return {"apiVersion": COSCHEDULING_API, "kind": "PodGroup", "metadata": meta(inc, inc.base), "spec": spec}
    return None


def pod_template(inc: Incarnation) -> dict[str, Any]:
    """What is laid over every pod of the group."""
    return _overlay(inc.cr.spec, inc.base)


def _overlay(spec: Spec, base: str) -> dict[str, Any]:
    kind = spec.scheduling.pod_group
    if kind == "Volcano":
        return {
            "metadata": {"annotations": {"scheduling.k8s.io/group-name": base}},
            "spec": {"schedulerName": "volcano"},
        }
    if kind == "Coscheduling":
        return {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": base}}}
    if kind == "Kueue":
        return {
            "metadata": {
                "labels": {"kueue.x-k8s.io/pod-group-name": base},
                # Kueue itself must not replace pods of a group one by one: a group is replaced as a whole, by us.
                "annotations": {
                    "kueue.x-k8s.io/pod-group-total-count": str(pods(spec)),
                    "kueue.x-k8s.io/pod-group-serving": "true",
                },
            }
        }
    return {}
