"""A node: containerd, kubelet and kube-proxy in a network namespace of their own."""

import json
from collections.abc import Mapping
from pathlib import Path

from . import addresses, containers, processes
from .certificates import CA, certificate, key, kubeconfig
from .commands import attempt
from .console import wait_until
from .control_plane import alive_and
from .network import inside, namespace
from .paths import LOGS, RUN, node_dir, node_run_dir
from .pause import PAUSE_IMAGE

_PARTS = ("containerd", "kubelet", "kube-proxy")
CONTAINERD_S = 60.0


def process_names(node: str) -> list[str]:
    """Names under which the node's processes are recorded."""
    return [f"{node}-{part}" for part in _PARTS]


def ensure_runtime(node: str) -> None:
    """Start containerd and wait until it answers."""
    directory, run_directory = node_dir(node), node_run_dir(node)
    for made in (directory / "cni", directory / "kubelet", LOGS / "pods" / node, run_directory):
        made.mkdir(parents=True, exist_ok=True)
    (directory / "containerd.toml").write_text(_containerd_config(node))
    (directory / "cni" / "10-bed.conflist").write_text(json.dumps(_cni_config(node), indent=1))
    (directory / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (directory / "kubelet.json").write_text(json.dumps(_kubelet_config(node), indent=1))
    name = f"{node}-containerd"
    argv = ["containerd", "--config", directory / "containerd.toml"]
    processes.ensure(name, inside(namespace(node), argv))
    wait_until(f"containerd of {node}", alive_and(name, lambda: _silent(node)), CONTAINERD_S)
    containers.weigh_pods()


def ensure_kubelet(node: str, binaries: Mapping[str, Path]) -> None:
    """Start kubelet and kube-proxy."""
    directory = node_dir(node)
    kubelet = [
        binaries["kubelet"],
        f"--config={directory / 'kubelet.json'}",
        f"--kubeconfig={kubeconfig(node)}",
        f"--root-dir={directory / 'kubelet'}",
        f"--cert-dir={directory / 'kubelet-pki'}",
        f"--hostname-override={node}",
        f"--node-ip={addresses.node_address(node)}",
    ]
    kube_proxy = [
        binaries["kube-proxy"],
        f"--kubeconfig={kubeconfig('kube-proxy')}",
        f"--hostname-override={node}",
        "--proxy-mode=iptables",
        "--conntrack-max-per-core=0",
        "--oom-score-adj=0",
    ]
    processes.ensure(f"{node}-kubelet", inside(namespace(node), kubelet))
    processes.ensure(f"{node}-kube-proxy", inside(namespace(node), kube_proxy))


def kill(node: str) -> None:
    """End everything on the node at once, as a power cut does."""
    processes.stop(process_names(node), grace_s=0)
    containers.kill_all(node_run_dir(node))


def _silent(node: str) -> str | None:
    answer = attempt(["ctr", "--address", containers.socket(node), "version"])
    return None if answer.returncode == 0 else (answer.stderr.strip() or "no answer")


def _cni_name(node: str) -> str:
    return f"dp-bed-{node}"


def _cni_config(node: str) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isDefaultGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": addresses.pod_range(node)}]],
            "dataDir": str(node_dir(node) / "cni-addresses"),
        },
    }
    return {"cniVersion": "0.4.0", "name": _cni_name(node), "plugins": [bridge]}


def _containerd_config(node: str) -> str:
    unused = ("btrfs", "zfs", "aufs", "devmapper")
    return f"""\
version = 2
root = "{node_dir(node) / "containerd"}"
state = "{node_run_dir(node) / "containerd"}"
disabled_plugins = [{", ".join(f'"io.containerd.snapshotter.v1.{one}"' for one in unused)}]

[grpc]
address = "{containers.socket(node)}"

[plugins."io.containerd.internal.v1.opt"]
path = "{node_dir(node) / "opt"}"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
# Lowering the score needs CAP_SYS_RESOURCE, which a container often lacks; without this every sandbox fails.
restrict_oom_score_adj = true
# The network namespaces of pods lie below `state`, so that cleaning finds them.
netns_mounts_under_state_dir = true
stream_server_address = "127.0.0.1"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{node_dir(node) / "cni"}"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "{RUN / node / "runc"}"
"""


def _kubelet_config(node: str) -> dict[str, object]:
    directory = node_dir(node)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(CA)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(certificate(node)),
        "tlsPrivateKeyFile": str(key(node)),
        "containerRuntimeEndpoint": f"unix://{containers.socket(node)}",
        "clusterDNS": [addresses.DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "resolvConf": str(directory / "resolv.conf"),
        "podLogsDir": str(LOGS / "pods" / node),
        "volumePluginDir": str(directory / "volume-plugins"),
        # Several kubelets share one machine with an old or mixed control group layout.
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        # A full disk of the developer's machine is no reason to evict pods.
        "evictionHard": {
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
        },
        # Images are loaded by hand and cannot be pulled again: never collect them.
        "imageGCHighThresholdPercent": 100,
        "imageMaximumGCAge": "0s",
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 10,
    }
