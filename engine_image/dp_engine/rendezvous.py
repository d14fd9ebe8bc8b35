"""The group of a lock-stepped MoE model: a real TCP star around rank 0, where vLLM has a torch process group.

Rank 0 listens on its *own machine's* binding of the address that INIT names, so a group whose rank 0 does not live
there fails exactly as it does with vLLM. One byte per rank and step goes in, one byte comes back.
Like the original, nobody reads the connection between two steps: an idle group does not notice a death.
"""

from __future__ import annotations

import select
import socket
import time

from dp_engine import logs

_MAGIC = b"DPG1"
_RETRY_S = 0.1
_HELLO_TIMEOUT_S = 5.0


class GroupBrokenError(Exception):
    """A member is gone, or the group never came together."""


class Group:
    """All ranks of one group, joined. `wake_fd` ends a wait early (a signal came)."""

    def __init__(self, *, rank: int, peers: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = peers
        self._heard: dict[int, bool] = {}  # flags of a step that a wake-up interrupted
        self._asked = False  # this rank's flag of the interrupted step is on its way

    def any(self, *, mine: bool, wake_fd: int, timeout_s: float) -> bool | None:
        """Logical or over all ranks; blocks until every rank has called it.

        None when `wake_fd` became readable first: call again to go on with the same step. Raises GroupBrokenError when a member is gone or slower than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        if self._rank == 0:
            for rank, peer in self._peers.items():
                if rank in self._heard:
                    continue
                flag = _receive_flag(peer, rank=rank, wake_fd=wake_fd, deadline=deadline)
                if flag is None:
                    return None
                self._heard[rank] = flag
            result = mine or any(self._heard.values())
            self._heard.clear()
            for rank, peer in self._peers.items():
                _send_flag(peer, flag=result, rank=rank)
            return result
        root = self._peers[0]
        if not self._asked:
            _send_flag(root, flag=mine, rank=0)
            self._asked = True
        flag = _receive_flag(root, rank=0, wake_fd=wake_fd, deadline=deadline)
        self._asked = flag is None
        return flag

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _send_flag(peer: socket.socket, *, flag: bool, rank: int) -> None:
    try:
        peer.sendall(b"\x01" if flag else b"\x00")
    except OSError as failure:
        raise GroupBrokenError(f"[gloo] Connection reset by peer: rank {rank}: {failure}") from failure


def _receive_flag(peer: socket.socket, *, rank: int, wake_fd: int, deadline: float) -> bool | None:
    poll = select.poll()
    poll.register(peer.fileno(), select.POLLIN)
    poll.register(wake_fd, select.POLLIN)
    events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
    if peer.fileno() in events:
        try:
            data = peer.recv(1)
        except OSError as failure:
            raise GroupBrokenError(f"[gloo] Connection reset by peer: rank {rank}: {failure}") from failure
        if not data:
            raise GroupBrokenError(f"[gloo] Connection closed by peer: rank {rank}")
        return data == b"\x01"
    if events:
        return None
    raise GroupBrokenError(f"rank {rank} did not take part in time")


def join(*, rank: int, size: int, host: str, port: int, timeout_s: float) -> Group:
    """Bring all ranks together. Raises GroupBrokenError."""
    deadline = time.monotonic() + timeout_s
    return _lead(size, host, port, deadline) if rank == 0 else _follow(rank, host, port, deadline)


def reach_oneself(*, host: str, timeout_s: float) -> None:
    """Open a store on every address of this machine and reach it at `host`, as a rank without a group does.

    Raises GroupBrokenError when `host` is somebody else's address.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(_family(host), socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        while True:
            try:
                socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic())).close()
            except OSError as failure:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise GroupBrokenError(
                        f"DistNetworkError: this rank's own store was not reached at {host}:{port}: {failure}. "
                        "VLLM_HOST_IP must be an address of this machine"
                    ) from failure
                time.sleep(_RETRY_S)
            else:
                return


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _lead(size: int, host: str, port: int, deadline: float) -> Group:
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(size)
    except OSError as failure:
        listener.close()
        raise GroupBrokenError(
            f"DistNetworkError: the server socket has failed to listen on {host}:{port}: {failure.strerror}. "
            "Rank 0 must run where --data-parallel-address points"
        ) from failure
    peers: dict[int, socket.socket] = {}
    with listener:
        while len(peers) < size - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                missing = [other for other in range(1, size) if other not in peers]
                for joined in peers.values():
                    joined.close()
                raise GroupBrokenError(f"ranks {missing[:16]} did not join {host}:{port} in time") from None
            except OSError:
                continue
            number = _rank_of(peer)
            if number is None or not 0 < number < size or number in peers:
                peer.close()  # a port scanner, or a rank that is none of this group's
            else:
                peers[number] = peer
    for other, peer in peers.items():
        _prepare(peer)
        _send_flag(peer, flag=True, rank=other)
    return Group(rank=0, peers=dict(sorted(peers.items())))


def _rank_of(peer: socket.socket) -> int | None:
    """The number with which a connection introduces itself; None when it does not."""
    peer.settimeout(_HELLO_TIMEOUT_S)
    try:
        hello = peer.recv(6, socket.MSG_WAITALL)
    except OSError:
        return None
    return int.from_bytes(hello[4:], "little") if len(hello) == 6 and hello[:4] == _MAGIC else None


def _follow(rank: int, host: str, port: int, deadline: float) -> Group:
    told = False
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise GroupBrokenError(f"DistNetworkError: rank 0 was not reached at {host}:{port} in time")
        try:
            root = socket.create_connection((host, port), timeout=left)
        except OSError as failure:
            if not told:
                logs.info(f"Waiting for rank 0's group store at {host}:{port} ({failure.strerror or failure})")
                told = True
            time.sleep(min(_RETRY_S, left))
            continue
        try:
            root.sendall(_MAGIC + rank.to_bytes(2, "little"))
            root.settimeout(max(0.001, deadline - time.monotonic()))
            if root.recv(1) == b"\x01":
                _prepare(root)
                return Group(rank=rank, peers={0: root})
        except OSError:
            pass
        root.close()
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))


def _prepare(peer: socket.socket) -> None:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
