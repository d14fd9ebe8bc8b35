"""What a pod that has a node is at until its engine runs, and whether it cannot go on. Pure.

A kubelet says `ContainerCreating` or `PodInitializing` for all of it. Condition PodReadyToStartContainers tells mounts
from pulls, and the order of the containers tells one pull from the next. Times are those of the node, so they are good
for words only, and what is before the pod was made cannot be.
"""

from __future__ import annotations

from typing import NamedTuple

from dp_operator.observe import ContainerStatus, Pod, Waiting, seconds

# Containers that are on their way, not stuck.
_ON_THE_WAY = ("ContainerCreating", "PodInitializing", "")


class Work(NamedTuple):
    """What a kubelet is at, in words, and since when."""

    words: str
    since: float | None


def has_begun(pod: Pod) -> bool:
    """Whether a pod's engine runs, or ran: all that comes before it is over."""
    engine = pod.engine
    return bool(engine and (engine.state.running or engine.state.terminated or engine.last_state.terminated))


def sidecars(pod: Pod) -> set[str]:
    """Init containers that nobody waits for: they run as long as the pod."""
    return {container.name for container in pod.spec.init_containers if container.restart_policy == "Always"}


def stuck(container: ContainerStatus) -> Waiting | None:
    """Why a container cannot go on, where its kubelet says so."""
    held = container.state.waiting
    return held if held and held.reason not in _ON_THE_WAY else None


def at_work(pod: Pod) -> Work:
    """What the kubelet is at in a pod whose engine has not begun."""
    words, since = _at_work(pod)
    made = seconds(pod.metadata.creation_timestamp)
    return Work(words, since if since is None or made is None else max(since, made))


def _at_work(pod: Pod) -> Work:
    scheduled, prepared = pod.condition("PodScheduled"), pod.condition("PodReadyToStartContainers")
    mounted = prepared is not None and prepared.status == "True"
    last = prepared if mounted else scheduled
    since = seconds(last.last_transition_time) if last else None
    beside = sidecars(pod)
    due = pod.engine
    for container in pod.status.init_container_statuses:
        running, ended = container.state.running, container.state.terminated
        if running and container.name in beside and container.started is not False:
            since = seconds(running.started_at)  # it runs for ever, and nothing waits for its end
        elif running:
            words = f"sidecar {container.name} is still starting"
            if container.name not in beside:
                words = f"init container {container.name} is still running"
            return Work(words, seconds(running.started_at))
        elif ended and ended.exit_code:
            return Work(f"init container {container.name} ended with exit code {ended.exit_code}", since)
        elif ended:
            since = seconds(ended.finished_at)
        else:
            due = container
            break
    if due is None or prepared is None:
        return Work("container starting", since)
    return Work(f"pulling image {due.image}" if mounted else "waiting for its mounts and network", since)
