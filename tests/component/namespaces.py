"""Network namespaces that tests make (root needed), each with a loopback of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000


def run(*words: str) -> str:
    """What a command prints; the test fails with what it complains about."""
    assert shutil.which(words[0]), f"{words[0]} is missing: apt-get install iproute2 iptables"
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def add(*namespaces: str) -> None:
    for namespace in namespaces:
        run("ip", "netns", "add", namespace)
        run("ip", "-n", namespace, "link", "set", "lo", "up")


def connect(namespace: str, device: str, other: str, other_device: str) -> None:
    """A cable between two namespaces; addresses come later."""
    cable = ["link", "add", device, "type", "veth", "peer", "name", other_device, "netns", other]
    run("ip", "-n", namespace, *cable)


def address(namespace: str, device: str, ip: str) -> None:
    """Give one end its address in a /24, and switch it on."""
    run("ip", "-n", namespace, "addr", "add", f"{ip}/24", "dev", device)
    run("ip", "-n", namespace, "link", "set", device, "up")


def delete(*namespaces: str) -> None:
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Let this thread's new sockets, threads and processes live in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{namespace}") as target:
        assert libc.setns(target.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0
