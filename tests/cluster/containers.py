"""Containers of a node as the kernel sees them, for stopping and cleaning without containerd's help.

containerd, its shims and the containers are three generations of processes, and any of them may be dead when the
bed is cleaned. What is always true: a shim carries the address of its containerd in its command line, and that
address lies in the bed's own directory.
"""

import contextlib
import os
from pathlib import Path

from .commands import run
from .errors import BedError
from .paths import RUN
from .processes import Started, start_ticks, stop_started

_SHIM = "containerd-shim-runc-v2"


def socket(node: str) -> Path:
    """Address of the node's containerd."""
    return RUN / node / "containerd.sock"


def ctr(node: str, *words: str | Path) -> str:
    """Run containerd's own client on the images and containers that the kubelet uses."""
    return run(["ctr", "--address", socket(node), "--namespace", "k8s.io", *words])


def kill_all(below: Path) -> None:
    """Kill every container, then its shim, whose containerd has its socket below that directory."""
    parents = _parents()
    shims = [pid for pid in parents if _is_shim(pid, below)]
    inside = [pid for pid in parents if pid not in shims and _descends(pid, frozenset(shims), parents)]
    for group in (inside, shims):
        stop_started(_started(group), grace_s=0)


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


def remove_shim_sockets(below: Path) -> None:
    """Shims keep their sockets in a directory of the whole machine; the address of each is noted in its bundle."""
    for note in below.glob("*/containerd/io.containerd.runtime.v2.task/*/*/address"):
        path = note.read_text().strip().removeprefix("unix://")
        if path.startswith("/run/containerd/s/"):
            Path(path).unlink(missing_ok=True)


def remove_cgroups(name: str) -> None:
    """Remove the control groups below that name; they are empty once the containers are dead."""
    for top in [*Path("/sys/fs/cgroup").glob(f"*/{name}"), Path("/sys/fs/cgroup") / name]:
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(FileNotFoundError):
                _remove_cgroup(directory)


def _remove_cgroup(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError as error:
        raise BedError(f"Cannot remove the control group {directory}: {error}. Who is in it: {directory}/cgroup.procs")


def remove_log_links(below: Path) -> None:
    """The kubelet links every container log in one directory of the whole machine."""
    for link in Path("/var/log/containers").glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(below):
            link.unlink()


def _started(pids: list[int]) -> list[Started]:
    return [Started(pid, ticks, "") for pid in pids if (ticks := start_ticks(pid)) is not None]


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
