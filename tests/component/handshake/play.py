"""The other players around the relay, for tests and benchmarks: vLLM's head, its ranks, and the relay as a process.

`head_loop` does what vLLM's head does while it waits for its engines (protocol notes §2.5), in own words: it answers
HELLO with INIT, and any frame that it does not expect ends it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import zmq

from dp_handshake.messages import CheckIn, LaunchPlan, Snapshot, WorkerSet
from dp_handshake.places import places
from tests.ports import free_port, free_ports

REPOSITORY = Path(__file__).resolve().parents[3]
HELLO = msgspec.msgpack.encode({"status": "HELLO", "local": False, "headless": True})
READY = msgspec.msgpack.encode({"status": "READY", "local": False, "headless": True})


class HeadAborted(Exception):  # noqa: N818 - the head's words, not ours
    """vLLM's head would have ended here, and with it the group."""


def init_message(ip: str = "127.0.0.1", *, input_port: int = 1) -> bytes:
    host = f"[{ip}]" if ":" in ip else ip
    return msgspec.msgpack.encode(
        {
            "addresses": {
                "inputs": [f"tcp://{host}:{input_port}"],
                "outputs": [f"tcp://{host}:2"],
                "coordinator_input": f"tcp://{host}:3",
                "coordinator_output": f"tcp://{host}:4",
                "frontend_stats_publish_address": "ipc:///tmp/stats",
            },
            "parallel_config": {},
        }
    )


def head_loop(
    router: zmq.Socket[bytes],
    *,
    size: int,
    head_ranks: int,
    init: bytes,
    stop: Callable[[], bool] = lambda: False,
    on_message: Callable[[int, str], None] = lambda rank, status: None,
    poll_ms: int = 200,
) -> None:
    """Wait for every remote rank as vLLM's head does. Raises HeadAborted where vLLM would die; returns when all are READY."""
    states: dict[int, str] = dict.fromkeys(range(head_ranks, size), "NEW")
    waiting = len(states)
    while waiting:
        if not router.poll(poll_ms):
            if stop():
                return
            continue
        frames = router.recv_multipart()
        if len(frames) != 2:
            raise HeadAborted(f"too many values to unpack: {frames!r}")
        identity, payload = frames
        rank = int.from_bytes(identity, "little")
        if len(identity) != 2 or rank not in states:
            raise HeadAborted(f"unexpected data parallel rank: {rank}")
        try:
            message = msgspec.msgpack.decode(payload)
            status, local, headless = message["status"], message["local"], message["headless"]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise HeadAborted(f"{type(error).__name__}: {error}") from error
        if local or not headless:
            raise HeadAborted(f"rank {rank}: local={local} headless={headless}")
        if status == "HELLO" and states[rank] == "NEW":
            router.send_multipart([identity, init])
            states[rank] = "CONNECTED"
        elif status == "READY" and states[rank] == "CONNECTED":
            states[rank] = "READY"
            waiting -= 1
        else:
            raise HeadAborted(f"Unexpected {status} message for remote engine {rank} in {states[rank]} state")
        on_message(rank, status)


class Head:
    """vLLM's head in a thread: ROUTER at rpcPort+1 until all ranks are READY, then the API's /health."""

    def __init__(self, plan: LaunchPlan, ip: str = "127.0.0.1", *, init: bytes | None = None) -> None:
        self.plan, self.ip = plan, ip
        self.seen: list[tuple[int, str]] = []
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._stop = threading.Event()
        self._init = init or init_message(ip)
        self._api: ThreadingHTTPServer | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.set(zmq.LINGER, 0)
            router.set(zmq.SNDHWM, 0)
            router.set(zmq.RCVHWM, 0)
            router.set(zmq.IPV6, int(":" in self.ip))
            router.bind(_endpoint(self.ip, self.plan.rpc_port + 1))
            try:
                head_loop(
                    router,
                    size=self.plan.size,
                    head_ranks=self.plan.head_ranks,
                    init=self._init,
                    stop=self._stop.is_set,
                    on_message=lambda rank, status: self.seen.append((rank, status)),
                )
            except BaseException as error:
                self.error = error
        if self.error is None and not self._stop.is_set():
            self._serve_api()
        self.done.set()

    def _serve_api(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in self.ip else socket.AF_INET

        self._api = Server((self.ip, self.plan.api_port), Handler)
        threading.Thread(target=self._api.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        if self._api is not None:
            self._api.shutdown()
            self._api.server_close()

    def finished(self, timeout_s: float = 10) -> None:
        """Every rank READY at the head, without any frame that would have ended it."""
        assert self.done.wait(timeout_s) or self.error, f"head still waits; it has seen {self.seen[-20:]}"
        if self.error is not None:
            raise self.error


class Rank:
    """One remote rank: a DEALER as vLLM's engine makes it."""

    def __init__(
        self, context: zmq.Context[Any], rank: int, port: int, *, ip: str = "127.0.0.1", source: str | None = None
    ) -> None:
        self.rank = rank
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.IDENTITY, rank.to_bytes(2, "little"))
        self.socket.set(zmq.LINGER, 5000)
        self.socket.set(zmq.IPV6, int(":" in ip))
        target = _endpoint(ip, port).removeprefix("tcp://")
        # `source:0;` chooses the address that the connection comes from.
        self.socket.connect(f"tcp://{source}:0;{target}" if source else f"tcp://{target}")

    def hello(self, frame: bytes = HELLO) -> None:
        self.socket.send(frame)

    def init(self, timeout_s: float = 10) -> bytes:
        if not self.socket.poll(timeout_s * 1000):
            raise AssertionError(f"rank {self.rank}: no INIT within {timeout_s} s")
        return self.socket.recv()

    def ready(self, frame: bytes = READY) -> None:
        """READY, and close at once, as vLLM's engine does."""
        self.socket.send(frame)
        self.socket.close()


def make_plan(**changes: Any) -> LaunchPlan:
    """A Colocated Internal group of four pods with a rank each, on free ports."""
    size, local = changes.get("size", 4), changes.get("size_local", 1)
    head_pods = 0 if changes.get("head_placement") == "Dedicated" else 1
    rpc = free_ports(2)
    fields: dict[str, Any] = {
        "name": "g",
        "group": 0,
        "incarnation": "abc12",
        "size": size,
        "size_local": local,
        "load_balancing": "Internal",
        "head_placement": "Colocated",
        "architecture": "Dense",
        "head_pod": "g-head",
        "workers": [
            WorkerSet(name="g-w", replicas=size // local - head_pods, first_rank=head_pods * local, rank_stride=local)
        ],
        "monitor_host": "127.0.0.1",
        "monitor_port": free_port(),
        "rpc_port": rpc,
        "api_port": free_port(),
        "head_argv": [],
        "worker_argv": [],
    }
    return LaunchPlan(**{**fields, **changes})


def address_of(pod_index: int) -> str:
    """The loopback address that plays the pod IP of the n-th worker pod."""
    return f"127.1.{pod_index // 200}.{pod_index % 200 + 1}"


class RelayProcess:
    """`dp-handshake relay` as the sidecar runs it."""

    def __init__(
        self,
        plan: LaunchPlan,
        directory: Path,
        *,
        ip: str = "127.0.0.1",
        heartbeat_s: float = 2.0,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.plan, self.ip, self.directory = plan, ip, directory
        self._prefix, self._heartbeat_s = prefix, heartbeat_s
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "plan.json").write_bytes(msgspec.json.encode(plan))
        self._log = (directory / "relay.log").open("ab")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *self._prefix,
                sys.executable,
                *("-m", "dp_handshake", "relay", "--plan", str(self.directory / "plan.json")),
                *("--state-dir", str(self.directory / "state"), "--pod-ip", self.ip),
                *("--heartbeat-interval", str(self._heartbeat_s)),
            ],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "operator")},
            stderr=self._log,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.plan.monitor_port}"

    def worker_pid(self) -> int:
        """Process id of the working process, the supervisor's child."""
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return int(text.split()[0])

    def get(self, path: str) -> tuple[int, str]:
        return http("GET", self.url + path)

    def snapshot(self) -> Snapshot:
        return msgspec.json.decode(self.get("/v1/handshake")[1], type=Snapshot)

    def until(self, condition: Callable[[Snapshot], bool], *, within_s: float = 10) -> Snapshot:
        """Wait until the snapshot fits; says what it last saw."""
        end = time.monotonic() + within_s
        last: object = "nothing"
        while time.monotonic() < end:
            try:
                snapshot = self.snapshot()
            except OSError as error:
                last = error
            else:
                if condition(snapshot):
                    return snapshot
                last = snapshot
            time.sleep(0.05)
        raise AssertionError(f"not within {within_s} s; last seen: {last}\n{self.log()[-3000:]}")

    def log(self) -> str:
        return (self.directory / "relay.log").read_text()

    def check_in_all(self, addresses: dict[str, str]) -> None:
        """Every pod checks in, once, without waiting."""
        self.until(lambda _: True)
        for place in places(self.plan):
            status, text = self.check_in(place.pod, addresses[place.pod])
            assert status == 200, text

    def check_in(self, pod: str, ip: str, *, launch: str = "first", wait_s: float = 0) -> tuple[int, str]:
        place = next(place for place in places(self.plan) if place.pod == pod)
        message = CheckIn(
            incarnation=self.plan.incarnation,
            pod=pod,
            ip=ip,
            launch=launch,
            role=place.role,
            first_rank=place.first_rank,
            ranks=place.ranks,
            wait_seconds=wait_s,
        )
        return http("POST", self.url + "/v1/check-in", msgspec.json.encode(message))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


class Group:
    """A whole group: the relay, vLLM's head, and as many remote ranks as are asked for."""

    def __init__(self, directory: Path, *, ip: str = "127.0.0.1", **options: Any) -> None:
        relay_options = {key: options.pop(key) for key in ("heartbeat_s", "prefix") if key in options}
        self.ip = ip
        self.plan = make_plan(**options)
        self.relay = RelayProcess(self.plan, directory, ip=ip, **relay_options)
        self.head: Head | None = None
        self.places = places(self.plan)
        self.addresses = {place.pod: address_of(number) for number, place in enumerate(self.places)}
        self.addresses[self.plan.head_pod] = ip

    def start(self) -> Head:
        """All pods check in, the head's ROUTER comes up, the relay opens its port."""
        self.relay.check_in_all(self.addresses)
        self.head = Head(self.plan, self.ip)
        self.relay.until(lambda snapshot: snapshot.listening_at is not None)
        return self.head

    def rank(self, context: zmq.Context[Any], rank: int, *, source: str | None = None) -> Rank:
        """A rank at the address of its pod, or at another."""
        place = next(place for place in self.places if rank in place.rank_range)
        source = source or self.addresses[place.pod]
        return Rank(context, rank, self.plan.rpc_port, ip=self.ip, source=None if ":" in source else source)

    def ranks(self, context: zmq.Context[Any]) -> list[Rank]:
        """All remote ranks."""
        return [self.rank(context, rank) for rank in range(self.plan.head_ranks, self.plan.size)]

    def close(self) -> None:
        self.relay.close()
        if self.head is not None:
            self.head.close()


def http(method: str, url: str, body: bytes | None = None, *, timeout_s: float = 30) -> tuple[int, str]:
    request = urllib.request.Request(url, data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def many_sockets() -> Iterator[zmq.Context[Any]]:
    """A context for thousands of DEALERs."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 10_000)
    try:
        yield context
    finally:
        context.destroy(linger=0)


def _endpoint(ip: str, port: int) -> str:
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"
