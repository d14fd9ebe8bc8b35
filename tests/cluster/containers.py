"""Containers of a node as the kernel sees them, for stopping and cleaning without containerd's help.

containerd, its shims and the containers are three generations of processes, and any of them may be dead when the
bed is cleaned. What is always true: a shim carries the address of its containerd in its command line, and that
address lies in the bed's own directory.
"""

import contextlib
import os
from functools import partial
from pathlib import Path

from .commands import run
from .console import wait_until
from .paths import RUN
from .processes import identified, stop_started

_SHIM = "containerd-shim-runc-v2"


def socket(node: str) -> Path:
    """Address of the node's containerd."""
    return RUN / node / "containerd.sock"


def ctr(node: str, *words: str | Path) -> str:
    """Run containerd's own client on the images and containers that the kubelet uses."""
    return run(ctr_argv(node, *words))


def ctr_argv(node: str, *words: str | Path) -> list[str]:
    """The command line of that."""
    return ["ctr", "--address", str(socket(node)), "--namespace", "k8s.io", *(str(word) for word in words)]


def kill_all(below: Path) -> None:
    """Kill every container, then its shim, whose containerd has its socket below that directory."""
    parents = _parents()
    shims = [pid for pid in parents if _is_shim(pid, below)]
    inside = [pid for pid in parents if pid not in shims and _descends(pid, frozenset(shims), parents)]
    for group in (inside, shims):
        stop_started(identified(group), grace_s=0)
    _remove_shim_sockets(below)


def unmount(*directories: Path) -> None:
    """Unmount everything mounted below these directories, the innermost first."""
    for point in mounts(*directories):
        run(["umount", "--lazy", point])


def mounts(*directories: Path) -> list[str]:
    """Mount points below these directories, the innermost first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    clear = [point.replace("\\040", " ") for point in points]
    prefixes = tuple(f"{directory}/" for directory in directories)
    return sorted((point for point in clear if point.startswith(prefixes)), key=len, reverse=True)


def bundles(below: Path) -> list[Path]:
    """The runtime's directory of every container, running or left over; its name is the container's id.

    `below` is the run directory of the bed or of one node.
    """
    inside = "containerd/io.containerd.runtime.v2.task/*/*"
    return [*below.glob(inside), *below.glob(f"*/{inside}")]


def _remove_shim_sockets(below: Path) -> None:
    """Shims keep their sockets in a directory of the whole machine; the address of each is noted in its bundle.

    At once when they are killed: a containerd that starts again removes the bundles of dead shims, notes and all.
    """
    for bundle in bundles(below):
        with contextlib.suppress(FileNotFoundError):
            path = (bundle / "address").read_text().strip().removeprefix("unix://")
            if path.startswith("/run/containerd/s/"):
                Path(path).unlink(missing_ok=True)


def remove_cni_results(below: Path) -> None:
    """CNI notes its result for each container in one directory of the whole machine."""
    for bundle in bundles(below):
        for note in Path("/var/lib/cni/results").glob(f"*-{bundle.name}-*"):
            note.unlink(missing_ok=True)


def remove_cgroups(below: Path) -> None:
    """Remove the control groups of dead containers: containerd names them after the container."""
    top = Path("/sys/fs/cgroup")
    groups = [group for bundle in bundles(below) for group in top.glob(f"**/k8s.io/{bundle.name}")]
    for group in groups:
        wait_until(f"the control group {group} to be empty", partial(_busy, group), 5.0)
    for parent in {group.parent for group in groups}:
        with contextlib.suppress(OSError):
            parent.rmdir()  # another containerd's containers may be in it


def weigh_pods() -> None:
    """Let pods have their part of the processors while tests and builds are busy on the same machine.

    All containers together are one control group, which otherwise weighs as much as one single process outside. (Only
    where the machine has the old layout: the new one weighs the sessions of the machine, not processes.)
    """
    group = Path("/sys/fs/cgroup/cpu/k8s.io")
    if group.parent.is_dir():
        group.mkdir(exist_ok=True)
        (group / "cpu.shares").write_text("8192")


def _busy(group: Path) -> str | None:
    """Remove a control group and those inside it; what keeps it if that fails."""
    for directory, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            return str(error)
    return None


def remove_log_links(below: Path) -> None:
    """The kubelet links every container log in one directory of the whole machine."""
    for link in Path("/var/log/containers").glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(below):
            link.unlink()


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = (entry / "stat").read_text()
                found[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    return found


def _is_shim(pid: int, below: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    if not words[0].endswith(_SHIM) or "-address" not in words:
        return False
    return Path(words[words.index("-address") + 1]).is_relative_to(below)


def _descends(pid: int, ancestors: frozenset[int], parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid in ancestors:
            return True
    return False
