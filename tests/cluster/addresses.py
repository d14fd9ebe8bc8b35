"""The bed's address plan, and the check that nothing else on the machine uses it.

198.18.0.0/15 is the range set aside for benchmarks (RFC 2544): nothing real lives there, so the bed cannot hide a
host that somebody needs. 198.18.0.0/24 are the machines, 198.18.101-103.0/24 the pods, 198.19.0.0/16 the Services.
"""

from collections.abc import Iterable
from ipaddress import IPv4Interface, IPv4Network

RANGE = IPv4Network("198.18.0.0/15")
MACHINES = IPv4Network("198.18.0.0/24")
SERVICES = IPv4Network("198.19.0.0/16")
CONTROL_PLANE = "198.18.0.10"
HOST = "198.18.0.254"
KUBERNETES_SERVICE = "198.19.0.1"
DNS_SERVICE = "198.19.0.10"
API_PORT = 6443
API_URL = f"https://{CONTROL_PLANE}:{API_PORT}"
NODES = ("n1", "n2", "n3")


def node_address(node: str) -> str:
    """The node's own address: n1 is 198.18.0.11."""
    return f"198.18.0.{10 + _number(node)}"


def pod_range(node: str) -> str:
    """The addresses of the node's pods: n1 has 198.18.101.0/24."""
    return f"198.18.{100 + _number(node)}.0/24"


def _number(node: str) -> int:
    return NODES.index(node) + 1


def taken_by(destinations: Iterable[tuple[str, str]], own_links: frozenset[str]) -> list[str]:
    """Routes and interface addresses of the host that collide with the bed's range.

    `destinations` are (network in CIDR form or "default", name of the link). A route as wide as 198.0.0.0/8 or
    wider is a way out to everywhere, not a use of the range.
    """
    return [
        f"{destination} on {link}"
        for destination, link in destinations
        if link not in own_links
        and destination != "default"
        and (network := IPv4Interface(destination).network).prefixlen > 8
        and network.overlaps(RANGE)
    ]
