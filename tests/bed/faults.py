"""Ways to hurt a group of the stand-in engine. Each returns when it struck, in seconds since the epoch."""

from __future__ import annotations

import re
import time
from typing import Any

from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster
from tests.e2e.kube import Space, engine_state

# An engine whose main process ends with any code at our command, as its launcher, an OOM killer or a segfault would.
COMMAND = [
    "python3",
    "-c",
    """
import os, signal, subprocess, sys, time
engine = subprocess.Popen(["vllm", "serve", *sys.argv[1:]])
signal.signal(signal.SIGTERM, lambda *_: engine.terminate())
while engine.poll() is None and not os.path.exists("/tmp/end"):
    time.sleep(0.05)
os._exit(int(open("/tmp/end").read()) if engine.poll() is None else engine.returncode)
""",
]
_END = (
    "import os,time; open('/tmp/ending','w').write('{code}'); os.rename('/tmp/ending','/tmp/end'); print(time.time())"
)
_SIGNAL = """
import os, pathlib, time
for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    if b'EngineCore' in path.read_bytes():
        print(time.time())
        os.kill(int(path.parent.name), {number})
"""


def end(space: Space, pod: str, code: int) -> float:
    """End an engine that was started by COMMAND."""
    return _told(space, pod, _END.format(code=code))


def signal_rank(space: Space, pod: str, number: int) -> float:
    """Send a signal to the process of the one rank in a pod."""
    return _told(space, pod, _SIGNAL.format(number=number))


def kill_engine(space: Space, bed: Bed | KindCluster, pod: str) -> float:
    """SIGKILL for the container's first process."""
    return _signal_engine(space, bed, pod, "SIGKILL")


def freeze_engine(space: Space, bed: Bed | KindCluster, pod: str) -> float:
    """SIGSTOP for the container's first process: it takes connections, answers none, and heeds no SIGTERM."""
    return _signal_engine(space, bed, pod, "SIGSTOP")


def _signal_engine(space: Space, bed: Bed | KindCluster, pod: str, name: str) -> float:
    found = space.get("pods", pod)
    assert "running" in engine_state(found)
    (container,) = [one["containerID"] for one in found["status"]["containerStatuses"] if one["name"] == "engine"]
    at = time.time()
    bed.signal_container(found["spec"]["nodeName"], container.partition("://")[2], name)
    return at


def delete_pod(space: Space, pod: str) -> float:
    at = time.time()
    space.delete("pods", pod)
    return at


def on_node(node: str, home: str, *, head: bool = False) -> Any:
    """Changes of a spec that put one member on a node as long as it takes pods, and the others at home."""

    def affinity(wish: Any, must: Any) -> Any:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_named(**must)]}}
        preferred = {"preferredDuringSchedulingIgnoredDuringExecution": wish}
        return {"spec": {"affinity": {"nodeAffinity": required | preferred}}}

    moves = affinity([{"weight": 100, "preference": _named(operator="In", values=[node])}], {"operator": "Exists"})
    stays = affinity([], {"operator": "In", "values": [home]})
    return {"template": stays, "headTemplate": moves} if head else {"template": moves, "headTemplate": stays}


def _named(**how: Any) -> Any:
    return {"matchExpressions": [{"key": "kubernetes.io/hostname", **how}]}


def _told(space: Space, pod: str, program: str) -> float:
    # It may end together with its container, so the time that it told is all that counts.
    said = space.kubectl("exec", pod, "--container=engine", "--", "python3", "-c", program, check=False)
    found = re.match(r"\d{10}\.\d+", said)
    assert found, said
    return float(found[0])
