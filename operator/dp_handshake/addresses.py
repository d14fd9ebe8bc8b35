"""IP addresses as text, in one spelling. Pure."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=16_384)
def canonical(text: str) -> str | None:
    """Give the one spelling of an address, IPv4-mapped IPv6 as IPv4; None if it is no address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def is_ipv6(text: str) -> bool:
    return ":" in text


def endpoint(address: str, port: int, scheme: str = "tcp") -> str:
    """Give `tcp://address:port` as ZeroMQ writes it, or the same with another scheme."""
    return f"{scheme}://[{address}]:{port}" if is_ipv6(address) else f"{scheme}://{address}:{port}"


def upstream_source(pod_ip: str) -> str | None:
    """Choose the address from which the relay connects to the engine's own ROUTER.

    It must differ from the pod IP, so that /proc/net/tcp tells the relay's connections from those of the head's own
    ranks, which come from the pod IP. None where no second loopback address exists (pod IP ::1, tests only).
    """
    address = ipaddress.ip_address(pod_ip)
    if isinstance(address, ipaddress.IPv6Address):
        return None if address.is_loopback else "::1"
    return "127.255.255.254" if address.is_loopback else "127.0.0.1"
