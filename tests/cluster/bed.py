"""The embedded bed as a whole: what the command line and the tests call."""

import fcntl
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from . import (
    api,
    certificates,
    containers,
    control_plane,
    leftovers,
    network,
    node,
    packages,
    pause,
    processes,
    programs,
)
from .addresses import NODES
from .commands import Words
from .console import say, step, wait_until
from .control_plane import alive_and
from .errors import BedError
from .leftovers import Verdict
from .paths import AUDIT_LOG, BIN, CHECKOUT, KUBECONFIG, LOCK, LOGS, STATE, check_length

NODE_READY_S = 120.0


@contextmanager
def alone() -> Iterator[None]:
    """One command at a time changes the machine's bed; a second one waits."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another command of the bed to end …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Bed:
    """Three nodes and a control plane on this machine. Methods may be called in any order and repeated."""

    nodes: Sequence[str] = NODES
    kubeconfig = KUBECONFIG
    kubectl = BIN / "kubectl"
    helm = BIN / "helm"
    audit_log = AUDIT_LOG

    def up(self) -> None:
        """Start whatever does not run, and return when all nodes are Ready."""
        check_length()
        packages.ensure()
        with alone():
            verdict = leftovers.settle()
            if verdict is Verdict.OURS and not certificates.CA.exists():
                # Somebody deleted .cluster under the running bed: nobody would trust the new certificates.
                leftovers.sweep(processes.read_owner())
                verdict = Verdict.DEAD
            if verdict is not Verdict.OURS:
                network.check_free()
            paths = programs.ensure()
            self._start(paths)

    def _start(self, paths: Mapping[str, Path]) -> None:
        for directory in (STATE, LOGS):
            directory.mkdir(parents=True, exist_ok=True)
        programs.link_clients(paths)
        with step("network and certificates"):
            network.ensure()
            certificates.ensure()
        pause_archive = pause.archive()
        began = datetime.now(UTC)
        with step("control plane and container runtimes"), ThreadPoolExecutor() as pool:
            runtimes = [pool.submit(_start_runtime, name, pause_archive) for name in NODES]
            control_plane.ensure(paths)
            for runtime in runtimes:
                runtime.result()
        for name in NODES:
            node.ensure_kubelet(name, paths)
        with step("nodes"):
            control_plane.ensure_cluster_objects()
            for name in NODES:
                self.wait_ready(name, since=began)

    def down(self, *, any_checkout: bool = False) -> None:
        """Stop the bed and remove all it made on this machine; logs stay."""
        with alone():
            owner = processes.read_owner()
            if owner is not None and owner.checkout != str(CHECKOUT) and not any_checkout:
                leftovers.settle()
                owner = None
            leftovers.sweep(owner)
            for entry in STATE.iterdir() if STATE.exists() else ():
                if entry != LOGS:
                    _delete(entry)

    def wait_ready(self, name: str, *, since: datetime | None = None) -> None:
        """Until the node is Ready, by a heartbeat later than `since`."""
        kubelet = f"{name}-kubelet"
        seen = alive_and(kubelet, lambda: _not_ready(name, since))
        wait_until(f"node {name} to be Ready", seen, NODE_READY_S)

    def status(self) -> dict[str, str]:
        """Every process of the bed, and every node's cable, in a word."""
        names = [*control_plane.NAMES, *(part for name in NODES for part in node.process_names(name))]
        found = {name: "running" if processes.running(name) else "stopped" for name in names}
        cables = {f"{name} cable": "plugged in" if network.port_is_up(name) else "out" for name in NODES}
        return {**found, **cables}

    def is_up(self) -> bool:
        """Whether everything runs and the apiserver is ready."""
        return all(word in ("running", "plugged in") for word in self.status().values()) and (
            api.missing("/readyz") is None
        )

    def partition(self, name: str) -> None:
        """Cut the node off from all others and from the host; its pods go on."""
        network.set_port(_own(name), up=False)

    def heal(self, name: str) -> None:
        """End a partition."""
        network.set_port(_own(name), up=True)

    def stop_node(self, name: str) -> None:
        """Cut the node's power: its cable is out and all its processes and containers are dead at once."""
        network.set_port(_own(name), up=False)
        with alone():
            node.kill(name)

    def start_node(self, name: str) -> None:
        """Start a stopped node and wait until it is Ready."""
        paths = programs.ensure()
        network.set_port(_own(name), up=True)
        began = datetime.now(UTC)
        with alone():
            _start_runtime(name, pause.archive())
            node.ensure_kubelet(name, paths)
        self.wait_ready(name, since=began)

    def stop(self, process: str) -> None:
        """Stop one process, for example apiserver or n2-kubelet."""
        if process not in self.status():
            raise BedError(f"No process {process!r}. There are: {', '.join(self.status())}")
        processes.stop([process])

    def start(self, process: str) -> None:
        """Start a process stopped by `stop`, and whatever else does not run."""
        if process not in self.status():
            raise BedError(f"No process {process!r}. There are: {', '.join(self.status())}")
        with alone():
            self._start(programs.ensure())

    def images_on(self, name: str) -> dict[str, str]:
        """References of the node's images and the digests they stand for."""
        lines = containers.ctr(_own(name), "images", "ls").splitlines()[1:]
        return {words[0]: words[2] for line in lines if len(words := line.split()) > 2}

    def tag_image(self, source: str, target: str, *, node_name: str | None = None) -> None:
        """Give an image another reference, on one node or on all."""
        for name in self._chosen(node_name):
            containers.ctr(name, "images", "tag", "--force", source, target)

    def remove_image(self, reference: str, *, node_name: str | None = None) -> None:
        """Forget a reference, on one node or on all."""
        for name in self._chosen(node_name):
            containers.ctr(name, "images", "rm", reference)

    def in_node(self, name: str, argv: Words) -> list[str]:
        """The command line that runs a program in the node's network namespace."""
        return network.inside(network.namespace(_own(name)), argv)

    def signal_container(self, name: str, container: str, signal: str) -> None:
        """A signal for a container's first process; the container's id is the one that the pod's status has."""
        containers.ctr(_own(name), "tasks", "kill", "--signal", signal, container)

    def log(self, process: str) -> str:
        """What a process has written."""
        path = processes.log_path(process)
        if not path.exists():
            raise BedError(f"No log of {process!r}. There are: {', '.join(sorted(p.stem for p in LOGS.glob('*.log')))}")
        return path.read_text(errors="replace")

    def _chosen(self, node_name: str | None) -> Sequence[str]:
        return [_own(name) for name in (NODES if node_name is None else (node_name,))]


def _start_runtime(name: str, pause_archive: Path) -> None:
    node.ensure_runtime(name)
    pause.ensure(name, pause_archive)


def _own(name: str) -> str:
    """The name of a node of this checkout's own bed; the sockets of another one's would look the same."""
    owner = processes.read_owner()
    if owner is None:
        raise BedError("The cluster is not up. Start it: python3 -m tests.cluster up")
    if owner.checkout != str(CHECKOUT):
        raise BedError(f"The bed on this machine belongs to another checkout: {owner.checkout}")
    if name not in NODES:
        raise BedError(f"No node {name!r}. There are: {', '.join(NODES)}")
    return name


def _not_ready(name: str, since: datetime | None) -> str | None:
    path = f"/api/v1/nodes/{name}"
    absent = api.missing(path)
    if absent is not None:
        return absent
    _, found = api.request("GET", path)
    for condition in found["status"].get("conditions", []):
        if condition["type"] == "Ready":
            beat = datetime.fromisoformat(condition["lastHeartbeatTime"])
            if condition["status"] != "True":
                return f"Ready={condition['status']}: {condition.get('message', '')[:200]}"
            return None if since is None or beat >= since else f"last heartbeat {beat:%H:%M:%S}"
    return "no condition Ready yet"


def _delete(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def describe() -> str:
    """How to use a cluster that is up."""
    return (
        f"The cluster is up. To use it:\n"
        f"  export KUBECONFIG={KUBECONFIG}\n"
        f"  export PATH={BIN}:$PATH\n"
        f"  kubectl get nodes\n"
        f"API calls are logged in {AUDIT_LOG}, everything else in {LOGS}."
    )
