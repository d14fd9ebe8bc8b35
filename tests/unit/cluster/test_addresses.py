"""The address plan, and what counts as a collision with it."""

from ipaddress import IPv4Network, ip_address

from tests.cluster import addresses
from tests.cluster.addresses import NODES, RANGE, taken_by

OWN = frozenset({"dp-bed"})


def test_everything_the_bed_uses_lies_in_its_range_and_no_two_ranges_overlap() -> None:
    ranges = [addresses.MACHINES, addresses.SERVICES, *(IPv4Network(addresses.pod_range(node)) for node in NODES)]

    assert all(one.subnet_of(RANGE) for one in ranges)
    assert not any(a.overlaps(b) for index, a in enumerate(ranges) for b in ranges[:index])
    machines = [addresses.CONTROL_PLANE, addresses.HOST, *map(addresses.node_address, NODES)]
    assert all(ip_address(one) in addresses.MACHINES for one in machines)
    assert len(set(machines)) == len(machines)


def test_a_route_or_an_address_of_somebody_else_inside_the_range_is_named() -> None:
    found = [("default", "eth0"), ("192.0.2.0/24", "eth0"), ("198.18.7.0/24", "vpn0"), ("198.19.1.2/32", "lo")]

    assert taken_by(found, OWN) == ["198.18.7.0/24 on vpn0", "198.19.1.2/32 on lo"]


def test_a_single_address_without_a_prefix_is_understood() -> None:
    assert taken_by([("198.18.0.10", "tun0")], OWN) == ["198.18.0.10 on tun0"]


def test_our_own_link_and_ways_out_to_everywhere_are_no_collision() -> None:
    found = [("198.18.0.254/24", "dp-bed"), ("128.0.0.0/1", "vpn0"), ("198.0.0.0/8", "vpn0")]

    assert taken_by(found, OWN) == []
