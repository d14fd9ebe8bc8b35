"""The Debian packages that the embedded bed needs."""

import os
import shutil
from pathlib import Path

from .commands import run
from .console import say, step
from .errors import BedError

# Program (or file) that shows the package is there, and the package.
NEEDED = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ipset": "ipset",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "openssl": "openssl",
    "gcc": "gcc",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "modprobe": "kmod",
}
GCC_HEADERS = {"/usr/include/stdio.h": "libc6-dev"}


def missing() -> list[str]:
    """Packages whose program is not on this machine."""
    needed = {**NEEDED, **GCC_HEADERS}
    return sorted({package for program, package in needed.items() if not _present(program)})


def _present(program: str) -> bool:
    if program.startswith("/"):
        return Path(program).exists()
    # /usr/sbin is not on everybody's PATH, and that is where some of these lie.
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def ensure() -> None:
    """Install what is missing when root on Debian; else say what is missing."""
    if os.geteuid() != 0:
        raise BedError("The embedded cluster makes network namespaces and mounts: run it as root, or install kind.")
    lacking = missing()
    if not lacking:
        return
    if shutil.which("apt-get") is None:
        raise BedError(f"Please install what these Debian packages contain: {' '.join(lacking)}")
    say(f"Missing Debian packages, installing them: {' '.join(lacking)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step("apt-get update"):
        run(["apt-get", "update"], env=env)
    with step("apt-get install"):
        run(["apt-get", "install", "-y", "--no-install-recommends", *lacking], env=env)
