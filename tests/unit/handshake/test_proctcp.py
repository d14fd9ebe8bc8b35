from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from dp_handshake import proctcp

DATA = Path(__file__).parent / "data"
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
V4 = (
    HEADER
    + "   0: 0100007F:3422 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n"
    + "   1: 056712C6:3422 056712C6:A1B2 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4 30 10 -1\n"
    + "   2: 056712C6:A1B2 056712C6:3422 01 00000000:00000000 00:00000000 00000000     0        0 3 1 0 20 4 30 10 -1\n"
    + "   3: 056712C6:3422 0100007F:B000 01 00000000:00000000 00:00000000 00000000     0        0 4 1 0 20 4 30 10 -1\n"
    + "   4: 056712C6:3422 096612C6:B001 06 00000000:00000000 00:00000000 00000000     0        0 4 1 0 20 4 30 10 -1\n"
)
V6 = (
    HEADER
    + "   0: 00000000000000000000000000000000:3422 00000000000000000000000000000000:0000 0A 00000000:00000000 00:0 0 0 0\n"
    + "   1: 0000000000000000FFFF0000056712C6:3422 0000000000000000FFFF0000096612C6:A1B2 01 00000000:00000000 00:0 0 0 0\n"
    + "   2: 000000FD000000000000000001000000:3422 000000FD000000000000000002000000:A1B2 01 00000000:00000000 00:0 0 0 0\n"
)
little_endian = pytest.mark.skipif(sys.byteorder != "little", reason="the sample was taken on a little-endian machine")


@little_endian
def test_the_heads_own_ranks_are_counted_and_the_relays_connections_are_not() -> None:
    rows = proctcp.parse(V4, local_ports={13346})
    assert proctcp.peers(rows, port=13346) == {"198.18.103.5": 1, "127.0.0.1": 1}


@little_endian
def test_ipv4_peers_of_a_dual_stack_socket_and_ipv6_peers_are_told() -> None:
    rows = proctcp.parse(V6, local_ports={13346})
    assert proctcp.peers(rows, port=13346) == {"198.18.102.9": 1, "fd00::2": 1}


@little_endian
def test_only_a_listener_on_the_pod_ip_or_on_every_address_counts() -> None:
    assert proctcp.listens(proctcp.parse(V6, local_ports={13346}), ip="198.18.103.5", port=13346)
    assert not proctcp.listens(proctcp.parse(V4, local_ports={13346}), ip="198.18.103.5", port=13346)
    assert proctcp.listens(proctcp.parse(V4, local_ports={13346}), ip="127.0.0.1", port=13346)


def test_other_ports_are_left_out_unread() -> None:
    assert proctcp.parse(V4, local_ports={80}) == []


def test_this_kernels_own_table_shows_a_listener_and_its_peer() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            rows = proctcp.parse(Path("/proc/net/tcp").read_text(), local_ports={port})
    assert proctcp.listens(rows, ip="127.0.0.1", port=port)
    assert proctcp.peers(rows, port=port) == {"127.0.0.1": 1}


def test_damaged_tables_are_read_as_far_as_they_go() -> None:
    for text in (
        "",
        "\n\n",
        HEADER,
        "a b c d e",
        "0: XX:3422 YY:3422 01",
        "0: 0100007F:3422",
        V4[:200],
        V6[: len(V6) - 30],
    ):
        proctcp.parse(text, local_ports={13346})


def test_a_connection_that_the_peer_closed_is_not_taken_for_one_that_we_gave_up() -> None:
    """FIN_WAIT1, FIN_WAIT2, TIME_WAIT and not yet closed: ours. CLOSE_WAIT, LAST_ACK: the peer was first."""
    states = {"01": True, "04": True, "05": True, "06": True, "08": False, "09": False}
    rows = [proctcp.Connection("10.0.0.1", 13345, "10.0.0.2", int(state, 16), state) for state in states]
    assert proctcp.closed_by_us(rows) == {("10.0.0.2", int(state, 16)) for state, ours in states.items() if ours}


def test_a_real_start_shows_local_connected_then_loaded() -> None:
    """vLLM 0.32, moe, one local rank (198.18.103.5) and one remote (198.18.102.9), seen from the head pod."""
    stages = []
    for line in (DATA / "proc_net_tcp_stages.txt").read_text().splitlines():
        pairs = ast.literal_eval(line.split(" ", 1)[1])
        rows = [proctcp.Connection("198.18.103.5", port, peer, 1, proctcp.ESTABLISHED) for port, peer in pairs]
        stages.append((proctcp.peers(rows, port=13346), proctcp.peers(rows, port=45641)))
    assert stages == [
        ({}, {}),
        ({"198.18.103.5": 1}, {}),
        ({"198.18.103.5": 1}, {}),
        ({"198.18.103.5": 1}, {"198.18.102.9": 1}),
        ({}, {"198.18.102.9": 1, "198.18.103.5": 1}),
    ]
