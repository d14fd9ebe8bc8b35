"""The same cluster by kind, where a container engine answers. Used instead of the embedded bed when it can be.

Every checkout has a cluster of its own, named after the checkout's path: none adopts or deletes that of another.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from . import programs
from .bed import Bed
from .commands import Words, attempt, run
from .console import say, step
from .errors import BedError
from .paths import AUDIT_LOG, BIN, CHECKOUT, KUBECONFIG, STATE


def cluster_name(checkout: Path) -> str:
    """Name of the kind cluster of a checkout, and so the beginning of its containers' names."""
    return f"dp-operator-{hashlib.sha256(str(checkout).encode()).hexdigest()[:8]}"


NAME = cluster_name(CHECKOUT)


def engine() -> str | None:
    """The container engine that answers, if any."""
    for name in ("docker", "podman"):
        if shutil.which(name) and attempt([name, "info"]).returncode == 0:
            return name
    return None


def choose() -> "Bed | KindCluster":
    """kind if it is installed and an engine answers, else the embedded bed; DP_CLUSTER=embedded insists on that."""
    if os.environ.get("DP_CLUSTER") == "embedded" or shutil.which("kind") is None:
        return Bed()
    found = engine()
    return Bed() if found is None else KindCluster(found)


class KindCluster:
    """What `Bed` does, on kind's containers."""

    nodes: Sequence[str] = tuple(f"{NAME}-worker{number}" for number in ("", "2", "3"))
    kubeconfig = KUBECONFIG
    kubectl = BIN / "kubectl"
    helm = BIN / "helm"
    audit_log = AUDIT_LOG

    def __init__(self, engine_name: str) -> None:
        """`engine_name`: docker or podman."""
        self.engine = engine_name
        self._env = {**os.environ, "KIND_EXPERIMENTAL_PROVIDER": engine_name}

    def up(self) -> None:
        """Create the cluster unless it exists."""
        STATE.mkdir(parents=True, exist_ok=True)
        self._link_clients()
        if NAME not in run(["kind", "get", "clusters"], env=self._env).split():
            AUDIT_LOG.touch()
            config = STATE / "kind.json"
            policy = {
                "apiVersion": "audit.k8s.io/v1",
                "kind": "Policy",
                "omitStages": ["RequestReceived"],
                "rules": [{"level": "Metadata"}],
            }
            (STATE / "audit-policy.json").write_text(json.dumps(policy))
            config.write_text(json.dumps(_config()))
            argv = ["kind", "create", "cluster", "--name", NAME, "--config", config, "--wait", "180s"]
            with step("kind create cluster"):
                run([*argv, "--kubeconfig", KUBECONFIG], env=self._env)
        else:
            run(["kind", "export", "kubeconfig", "--name", NAME, "--kubeconfig", KUBECONFIG], env=self._env)

    def _link_clients(self) -> None:
        on_path = {name: Path(path) for name in programs.CLIENTS if (path := shutil.which(name))}
        lacking = [name for name in programs.CLIENTS if name not in on_path]
        programs.link_clients({**on_path, **(programs.ensure(lacking) if lacking else {})})

    def down(self, *, any_checkout: bool = False) -> None:
        """Delete the cluster."""
        run(["kind", "delete", "cluster", "--name", NAME], env=self._env)
        shutil.rmtree(STATE, ignore_errors=True)

    def status(self) -> dict[str, str]:
        """State of every container of the cluster."""
        shown = run([self.engine, "ps", "-a", "--filter", f"name={NAME}-", "--format", "{{.Names}}={{.State}}"])
        return dict(line.split("=", 1) for line in shown.splitlines())

    def is_up(self) -> bool:
        """Whether every container runs."""
        words = self.status().values()
        return bool(words) and all(word == "running" for word in words)

    def load(self, archive: Path) -> None:
        """Load an image archive on every node."""
        run(["kind", "load", "image-archive", archive, "--name", NAME], env=self._env)

    def partition(self, name: str) -> None:
        """Drop all packets of the node's network link."""
        for chain, side in (("INPUT", "-i"), ("OUTPUT", "-o")):
            self._exec(name, ["iptables", "-I", chain, "1", side, "eth0", "-j", "DROP"])

    def heal(self, name: str) -> None:
        """End a partition."""
        for chain, side in (("INPUT", "-i"), ("OUTPUT", "-o")):
            self._exec(name, ["iptables", "-D", chain, side, "eth0", "-j", "DROP"])

    def stop_node(self, name: str) -> None:
        """Kill the node's container."""
        run([self.engine, "kill", name])

    def start_node(self, name: str) -> None:
        """Start it again and wait until it is Ready."""
        run([self.engine, "start", name])
        argv = [self.kubectl, "--kubeconfig", KUBECONFIG, "wait", "--for=condition=Ready", f"node/{name}"]
        run([*argv, "--timeout=120s"])

    def stop(self, process: str) -> None:
        """Not on kind: its processes are kubeadm's."""
        raise BedError(f"Cannot stop {process} on kind; use the embedded bed (DP_CLUSTER=embedded).")

    def start(self, process: str) -> None:
        """Not on kind."""
        raise BedError(f"Cannot start {process} on kind; use the embedded bed (DP_CLUSTER=embedded).")

    def signal_container(self, name: str, container: str, signal: str) -> None:
        """A signal for a container's first process; the container's id is the one that the pod's status has."""
        self._exec(name, ["ctr", "-n", "k8s.io", "tasks", "kill", "--signal", signal, container])

    def images_on(self, name: str) -> dict[str, str]:
        """References of the node's images and the digests they stand for."""
        lines = self._exec(name, ["ctr", "-n", "k8s.io", "images", "ls"]).splitlines()[1:]
        return {words[0]: words[2] for line in lines if len(words := line.split()) > 2}

    def tag_image(self, source: str, target: str, *, node_name: str | None = None) -> None:
        """Give an image another reference, on one node or on all."""
        for name in self.nodes if node_name is None else (node_name,):
            self._exec(name, ["ctr", "-n", "k8s.io", "images", "tag", "--force", source, target])

    def remove_image(self, reference: str, *, node_name: str | None = None) -> None:
        """Forget a reference, on one node or on all."""
        for name in self.nodes if node_name is None else (node_name,):
            self._exec(name, ["ctr", "-n", "k8s.io", "images", "rm", reference])

    def log(self, process: str) -> str:
        """Log of one of the cluster's containers."""
        say(f"(the log of the container {process}; `kind export logs` gives all)")
        return run([self.engine, "logs", process])

    def _exec(self, name: str, argv: Words) -> str:
        return run([self.engine, "exec", name, *argv])


def _config() -> dict[str, object]:
    """A control plane with the audit log, and three workers."""
    patch = {
        "kind": "ClusterConfiguration",
        "apiServer": {
            "extraArgs": {
                "audit-log-path": "/var/log/kubernetes/audit.log",
                "audit-policy-file": "/etc/kubernetes/audit-policy.json",
                "audit-log-maxsize": "1000",
            },
            "extraVolumes": [
                _volume("audit-policy", "/etc/kubernetes/audit-policy.json", read_only=True),
                _volume("audit-log", "/var/log/kubernetes/audit.log", read_only=False),
            ],
        },
    }
    mounts = [
        {"hostPath": str(STATE / "audit-policy.json"), "containerPath": "/etc/kubernetes/audit-policy.json"},
        {"hostPath": str(AUDIT_LOG), "containerPath": "/var/log/kubernetes/audit.log"},
    ]
    control_plane = {"role": "control-plane", "extraMounts": mounts, "kubeadmConfigPatches": [json.dumps(patch)]}
    workers = [{"role": "worker"} for _ in range(3)]
    return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": [control_plane, *workers]}


def _volume(name: str, path: str, *, read_only: bool) -> dict[str, object]:
    return {"name": name, "hostPath": path, "mountPath": path, "readOnly": read_only, "pathType": "File"}
