"""One network namespace per machine of the bed, and a switch between them.

`dp-sw` holds a bridge; `dp-cp` (control plane) and `dp-n1` … `dp-n3` have a veth into it, and the host has one too,
named dp-bed. No namespace has a default route, so nothing of the bed can reach anything outside it.
"""

import contextlib
import json
import os
from pathlib import Path

from . import addresses
from .addresses import NODES
from .commands import Words, attempt, run
from .errors import BedError

SWITCH = "dp-sw"
CONTROL_PLANE = "dp-cp"
HOST_LINK = "dp-bed"
_NETNS = Path("/run/netns")


def namespace(node: str) -> str:
    """Name of the node's network namespace."""
    return f"dp-{node}"


NAMESPACES = (SWITCH, CONTROL_PLANE, *(namespace(node) for node in NODES))


def inside(name: str, argv: Words) -> list[str]:
    """The command line that runs a program in a namespace.

    nsenter and not `ip netns exec`: the latter mounts /sys anew and hides the cgroups.
    """
    return ["nsenter", f"--net={_NETNS / name}", *(str(word) for word in argv)]


def exists(name: str) -> bool:
    """Whether the namespace is there; a plain file of that name is what a reboot leaves on a /run on disk."""
    try:
        return (_NETNS / name).stat().st_dev != _NETNS.stat().st_dev
    except FileNotFoundError:
        return False


def check_free() -> None:
    """Refuse to start when the host uses addresses of the bed's range for something else."""
    routes = [(one["dst"], one.get("dev", "?")) for one in json.loads(run(["ip", "-j", "-4", "route"]))]
    links = [
        (f"{info['local']}/{info['prefixlen']}", link["ifname"])
        for link in json.loads(run(["ip", "-j", "-4", "addr"]))
        for info in link["addr_info"]
    ]
    taken = addresses.taken_by([*routes, *links], frozenset({HOST_LINK}))
    if taken:
        raise BedError(
            f"The bed needs the addresses {addresses.RANGE}, but this machine uses some of them: "
            f"{', '.join(taken)}. Free them (`ip route`, `ip addr` show who), or install kind and use that."
        )


def ensure() -> None:
    """Make what is missing of the namespaces, links, addresses and routes; heals partitions."""
    for name in NAMESPACES:
        if not exists(name):
            (_NETNS / name).unlink(missing_ok=True)
            run(["ip", "netns", "add", name])
        _ip(name, "link", "set", "lo", "up")
    if not _has_link(SWITCH, "br0"):
        _ip(SWITCH, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
    _ip(SWITCH, "link", "set", "br0", "up")
    _plug("cp", CONTROL_PLANE, addresses.CONTROL_PLANE)
    for node in NODES:
        _plug(node, namespace(node), addresses.node_address(node))
        _service_sink(namespace(node))
    _plug_host()
    for node in NODES:
        for name in (CONTROL_PLANE, *(namespace(other) for other in NODES if other != node)):
            _ip(name, "route", "replace", addresses.pod_range(node), "via", addresses.node_address(node))
        run(["ip", "route", "replace", addresses.pod_range(node), "via", addresses.node_address(node)])


def set_port(node: str, *, up: bool) -> None:
    """Plug the node's cable in or out, at the switch: taking its own eth0 down would lose its routes for good."""
    _ip(SWITCH, "link", "set", _port(node), "up" if up else "down")


def port_is_up(node: str) -> bool:
    """Whether the node's cable is plugged in."""
    shown = attempt(["ip", "-n", SWITCH, "-j", "link", "show", _port(node)])
    return shown.returncode == 0 and "UP" in json.loads(shown.stdout)[0]["flags"]


def members() -> list[int]:
    """Processes that live in one of the bed's namespaces, whoever started them."""
    ours = {(_NETNS / name).stat().st_ino for name in NAMESPACES if exists(name)}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if (entry / "ns" / "net").stat().st_ino in ours:
                    found.append(int(entry.name))
    return found


def remove() -> None:
    """Delete the host's link and the namespaces; the links inside go with them."""
    attempt(["ip", "link", "del", HOST_LINK])
    for name in NAMESPACES:
        if exists(name):
            run(["ip", "netns", "del", name])
        (_NETNS / name).unlink(missing_ok=True)


def _port(member: str) -> str:
    return f"p-{member}"


def _ip(name: str, *words: str) -> None:
    run(["ip", "-n", name, *words])


def _has_link(name: str, link: str) -> bool:
    return attempt(["ip", "-n", name, "link", "show", link]).returncode == 0


def _plug(member: str, name: str, address: str) -> None:
    if not (_has_link(SWITCH, _port(member)) and _has_link(name, "eth0")):
        _ip(SWITCH, "link", "add", _port(member), "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip(SWITCH, "link", "set", _port(member), "master", "br0", "up")
    _ip(name, "addr", "replace", f"{address}/{addresses.MACHINES.prefixlen}", "dev", "eth0")
    _ip(name, "link", "set", "eth0", "up")


def _plug_host() -> None:
    if attempt(["ip", "link", "show", HOST_LINK]).returncode != 0:
        peer = ["peer", "name", HOST_LINK, "netns", str(os.getpid())]
        _ip(SWITCH, "link", "add", _port("host"), "type", "veth", *peer)
    _ip(SWITCH, "link", "set", _port("host"), "master", "br0", "up")
    run(["ip", "addr", "replace", f"{addresses.HOST}/{addresses.MACHINES.prefixlen}", "dev", HOST_LINK])
    run(["ip", "link", "set", HOST_LINK, "up"])


def _service_sink(name: str) -> None:
    """Give Service addresses a route, so that the node's own connections to them meet kube-proxy's rules.

    The link is an empty bridge (not every kernel has dummy links): an address without a rule ends there.
    """
    if not _has_link(name, "svc0"):
        _ip(name, "link", "add", "svc0", "type", "bridge")
    _ip(name, "link", "set", "svc0", "up")
    _ip(name, "route", "replace", str(addresses.SERVICES), "dev", "svc0")
    # Bridged packets between two pods of a node must pass kube-proxy's rules as well: hence the second setting.
    settings = "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables"
    run(inside(name, ["sh", "-c", settings]))
