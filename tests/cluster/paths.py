"""Where the bed keeps its things.

Bulky state lies in the checkout under `.cluster`. Sockets lie in a short directory under /run, because the path of
a unix socket may have at most 107 characters. What is expensive to make (binaries, image layers) lies in a cache
that all checkouts of a user share, under names made from its inputs.
"""

import os
from pathlib import Path

from .errors import BedError

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent
STATE = CHECKOUT / ".cluster"
LOGS = STATE / "logs"
BIN = STATE / "bin"
KUBECONFIG = STATE / "kubeconfig"
AUDIT_LOG = STATE / "audit.log"
RUN = Path("/run/dp-operator-bed")
OWNER = RUN / "owner.json"
LOCK = Path("/run/lock/dp-operator-bed.lock")

# The longest socket that the kubelet makes below the checkout.
_LONGEST_SOCKET = ".cluster/nodes/n1/kubelet/pod-resources/kubelet.sock"


def cache_dir() -> Path:
    """The user's cache of this project; read at each call so that tests can move it."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dp-operator"


def node_dir(node: str) -> Path:
    """Disk state of a node: images, volumes, certificates, pod logs."""
    return STATE / "nodes" / node


def node_run_dir(node: str) -> Path:
    """Sockets and runtime state of a node; worthless after a reboot."""
    return RUN / node


def check_length() -> None:
    """Refuse a checkout whose path is too long for the kubelet's sockets."""
    longest = len(str(CHECKOUT / _LONGEST_SOCKET))
    if longest > 107:
        raise BedError(
            f"The path of this checkout is {longest - 107} characters too long for the kubelet's unix sockets: "
            f"{CHECKOUT}. Use a checkout with a shorter path."
        )
