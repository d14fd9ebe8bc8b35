"""One real rank in the hands of a scripted front end: what it says and answers, frame by frame."""

import time

import msgspec
import pytest
import zmq

from dp_engine import wire
from dp_engine.handshake import Addresses, Init

RANK = wire.identity(1)


class Head:
    """Sockets of a head with one API server and, if asked for, a coordinator."""

    def __init__(self, bed):
        self.context = zmq.Context()
        self.bed = bed
        self.shake = self.bound(zmq.ROUTER, f"tcp://127.0.0.1:{bed.rpc_port}")
        self.inputs = self.bound(zmq.ROUTER)
        self.outputs = self.bound(zmq.PULL)
        self.back = self.bound(zmq.XPUB)
        self.reports = self.bound(zmq.PULL)

    def bound(self, kind, address="tcp://127.0.0.1:*"):
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.bind(address)
        return socket

    def start(self, *argv, coordinator=False, **kwargs):
        self.worker = self.bed.workers(*argv, size=2, start=1, **kwargs)
        assert wire.decode(self.shake.recv_multipart()[1])["status"] == "HELLO"
        where = {
            name: socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
            for name, socket in vars(self).items()
            if isinstance(socket, zmq.Socket)
        }
        addresses = Addresses(
            inputs=[where["inputs"]],
            outputs=[where["outputs"]],
            coordinator_input=where["back"] if coordinator else None,
            coordinator_output=where["reports"] if coordinator else None,
            frontend_stats_publish_address="tcp://head:7",
        )
        self.shake.send_multipart([RANK, wire.encode(Init(addresses=addresses, parallel_config={}))])

    def first_frame(self):
        identity, frame = self.inputs.recv_multipart()
        assert identity == RANK
        return frame

    def ready(self):
        return wire.decode(self.shake.recv_multipart()[1])

    def send(self, kind, payload):
        self.inputs.send_multipart([RANK, kind, payload])

    def call(self, method, *arguments, number=1):
        self.send(wire.UTILITY, wire.encode([0, number, method, list(arguments)]))
        return self.answer()

    def answer(self):
        while True:
            found = wire.decode_outputs(self.outputs.recv())
            if found.utility is not None:
                return found.utility

    def add(self, name="r", **sampling):
        self.send(
            wire.ADD,
            wire.encode_add(
                request_id=name,
                external_id=name,
                prompt_token_ids=[1, 2],
                sampling=sampling,
                rank=None,
                client_index=0,
                wave=0,
            ),
        )

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def head(bed):
    head = Head(bed)
    yield head
    head.close()


def test_ready_comes_only_after_the_coordinators_word(head):
    head.start(coordinator=True)
    assert head.back.recv() == b"\x01"
    assert head.first_frame()
    assert not head.shake.poll(500), "loaded, connected, and waiting for the others"
    head.send(wire.UTILITY, wire.encode([0, 1, "get_supported_tasks", []]))
    assert not head.outputs.poll(300), "no call is answered before"
    head.back.send(b"READY")
    assert head.ready()["status"] == "READY"
    assert head.answer() == [1, None, [None, ["generate"]]]


@pytest.mark.parametrize("version", ["0.17.1", "0.20.2", "0.33.0"])
def test_the_first_frame_and_ready_are_those_of_the_release(head, version):
    head.start("--emulate-version", version)
    first, ready = head.first_frame(), head.ready()
    if version == "0.17.1":
        assert first == b""
        assert (ready["num_gpu_blocks"], ready["dp_stats_address"]) == (8192, "tcp://head:7")
    else:
        assert wire.decode(first)["dp_stats_address"] == "tcp://head:7"
        assert set(ready) == {"status", "local", "headless"}


CALLS = {
    "reset_mm_cache": None,
    "get_supported_tasks": ["generate"],
    "is_sleeping": False,
    "reset_prefix_cache": True,
    "list_loras": [],
    "is_scheduler_paused": False,
    "collective_rpc": [None],
}


def test_utility_calls_are_answered_and_unknown_ones_do_no_harm(head):
    head.start()
    head.first_frame()
    head.ready()
    for number, (method, value) in enumerate(CALLS.items()):
        assert head.call(method, number=number) == [number, None, [None, value]]
    number, failure, result = head.call("make_coffee", number=99)
    assert (number, result) == (99, None)
    assert "make_coffee" in failure
    assert head.call("inject_fault", "crash", number=100)[2] is None, "off unless asked for"
    assert head.call("is_sleeping", number=101)[2] == [None, False]


def test_a_paused_rank_keeps_its_requests_until_it_is_resumed(head):
    head.start()
    head.first_frame()
    head.ready()
    head.call("pause_scheduler")
    head.add(max_tokens=1)
    assert head.call("is_scheduler_paused")[2] == [None, True]
    assert not head.outputs.poll(300)
    head.call("resume_scheduler")
    assert wire.decode_outputs(head.outputs.recv()).finished == ["r"]


def test_an_abort_is_confirmed_and_an_unknown_one_ignored(head):
    head.start()
    head.first_frame()
    head.ready()
    head.add("long", max_tokens=10_000, ignore_eos=True)
    assert wire.decode_outputs(head.outputs.recv()).outputs[0][0] == "long"
    head.send(wire.ABORT, wire.encode(["unknown", "long"]))
    deadline = time.monotonic() + 5
    while not (found := wire.decode_outputs(head.outputs.recv())).finished:
        assert time.monotonic() < deadline
    assert found.finished == ["long"]
    assert found.stats["num_running_reqs"] == 0


MALFORMED = {
    "no msgpack": (wire.ADD, b"\xc1"),
    "a short request": (wire.ADD, wire.encode(["r"])),
    "limits that are no numbers": (
        wire.ADD,
        wire.encode(["r", [1], None, {"max_tokens": "many"}, None, 1.0, None, None, None]),
    ),
    "a limit that is infinite": (
        wire.ADD,
        wire.encode(["r", [1], None, {"max_tokens": float("inf")}, None, 1.0, None, None, None]),
    ),
    "nesting without end": (wire.ADD, b"\x91" * 100_000),
    "log probabilities that are no number": (
        wire.ADD,
        wire.encode(["r", [1], None, {"logprobs": "some"}, None, 1.0, None, None, None]),
    ),
    "an abort of a number": (wire.ABORT, wire.encode(5)),
    "a call without arguments": (wire.UTILITY, wire.encode([0, 1])),
    "a wave without a number": (wire.START_DP_WAVE, wire.encode([1])),
    "an unknown kind": (b"\x09", wire.encode([1])),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_message_makes_the_rank_deaf_and_nothing_else(head, case):
    head.start(coordinator=True)
    head.back.recv()
    head.first_frame()
    head.back.send(b"READY")
    head.ready()
    head.send(*MALFORMED[case])
    head.worker.wait_for("Input thread died")
    head.add(max_tokens=1)
    assert not head.outputs.poll(500)
    assert head.worker.popen.poll() is None


def test_a_repeated_ready_of_the_coordinator_is_ignored(head):
    head.start(coordinator=True)
    head.back.recv()
    head.first_frame()
    head.back.send(b"READY")
    head.ready()
    head.back.send(b"READY")
    head.add(max_tokens=1)
    assert wire.decode_outputs(head.outputs.recv()).finished == ["r"]


@pytest.mark.parametrize(
    ("version", "widest"),
    [("0.17.1", None), ("0.20.2", None), ("0.27.0", "kv_cache_usage"), ("0.33.0", "kv_cache_usage")],
)
def test_dense_ranks_of_0_14_to_0_26_tell_the_coordinator_nothing(head, version, widest):
    head.start("--emulate-version", version, coordinator=True)
    head.back.recv()
    head.first_frame()
    head.back.send(b"READY")
    head.ready()
    head.add(max_tokens=1)
    assert wire.decode_outputs(head.outputs.recv()).finished == ["r"]
    if widest is None:
        assert not head.reports.poll(300)
    else:
        assert widest in wire.decode_outputs(head.reports.recv()).stats


def test_an_init_that_is_no_init_ends_the_rank(head):
    head.worker = head.bed.workers(size=2, start=1)
    identity, _ = head.shake.recv_multipart()
    head.shake.send_multipart([identity, msgspec.msgpack.encode({"addresses": {"inputs": [], "outputs": []}})])
    assert head.worker.exit_code() == 0
    assert "missing required field `parallel_config`" in head.worker.log()


def test_a_rank_outlives_its_head_and_answers_whoever_takes_its_place(head, wait):
    head.start()
    head.first_frame()
    head.ready()
    addresses = [socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") for socket in (head.inputs, head.outputs)]
    head.close()
    head.context = zmq.Context()
    head.inputs, head.outputs = (
        head.bound(kind, address) for kind, address in zip((zmq.ROUTER, zmq.PULL), addresses, strict=True)
    )
    head.inputs.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def asks():
        try:
            head.send(wire.UTILITY, wire.encode([0, 1, "is_sleeping", []]))
        except zmq.ZMQError:
            return False  # the rank has not come back yet
        return True

    wait(asks, within_s=10, last=head.worker.log)
    assert head.answer()[1] is None
    assert head.worker.popen.poll() is None


def test_requests_are_refused_while_a_rank_drains(head):
    head.start("--shutdown-timeout", "5")
    head.first_frame()
    head.ready()
    head.add("old", max_tokens=60, ignore_eos=True)
    head.outputs.recv()
    head.worker.popen.terminate()
    head.worker.wait_for("draining for 5 s")
    assert head.call("is_sleeping")[1] == "Server shutting down"
    head.add("new", max_tokens=5)
    ends = {}
    while len(ends) < 2:
        for item in wire.decode_outputs(head.outputs.recv()).outputs:
            if item[5] is not None:
                ends[item[0]] = wire.FinishReason(item[5])
    assert ends == {"old": wire.FinishReason.LENGTH, "new": wire.FinishReason.ABORT}
