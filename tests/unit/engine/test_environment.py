"""Environment variables that touch the launch, and what a start makes of children that end."""

import signal
import time

import pytest
import zmq

from dp_engine import engine, environment, wire
from dp_engine.engine_core import EngineConfig
from dp_engine.front_end import StartError, run_handshake
from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, Init, hello
from dp_engine.launcher import group_ports
from dp_engine.modes import resolve
from dp_engine.options import parse_options
from dp_engine.processes import Stopper, fork
from dp_engine.rendezvous import GroupBrokenError, reach_oneself
from dp_engine.versions import wire_of


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"VLLM_PORT": "tcp://10.96.0.7:80"}, "appears to be a URI"),
        ({"VLLM_ENGINE_READY_TIMEOUT_S": "ten"}, "VLLM_ENGINE_READY_TIMEOUT_S must be a number"),
        ({"VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": "1"}, "asks for a rank that joins a running group"),
        ({"VLLM_RPC_BASE_PATH": "/nowhere"}, "is no folder that can be written to"),
        ({"VLLM_RPC_BASE_PATH": "/" * 91}, "too long"),
        ({"VLLM_DP_MASTER_PORT": "tcp://10.96.0.7:80"}, "VLLM_DP_MASTER_PORT must be a number"),
    ],
)
def test_a_variable_that_cannot_be_read_ends_the_start(env, message):
    with pytest.raises(ValueError, match=message):
        environment.check(env)


def test_host_ip_without_vllms_prefix_is_ignored_with_a_warning(capfd):
    environment.check({"HOST_IP": "192.0.2.1"})
    assert "HOST_IP is ignored" in capfd.readouterr().err
    assert environment.own_ip({"HOST_IP": "192.0.2.1"}) != "192.0.2.1"
    assert environment.own_ip({"VLLM_HOST_IP": "192.0.2.1", "HOST_IP": "192.0.2.2"}) == "192.0.2.1"


def test_the_other_front_end_is_not_here_and_that_is_said(capfd):
    environment.check({"VLLM_USE_RUST_FRONTEND": "0"})
    assert capfd.readouterr().err == ""
    environment.check({"VLLM_USE_RUST_FRONTEND": "1"})
    assert "VLLM_USE_RUST_FRONTEND is ignored" in capfd.readouterr().err


def test_a_rank_reaches_itself_at_its_own_address_only():
    reach_oneself(host="127.0.0.1", timeout_s=5)
    with pytest.raises(GroupBrokenError, match="VLLM_HOST_IP must be an address of this machine"):
        reach_oneself(host="255.255.255.255", timeout_s=0.1)


def test_ports_are_searched_from_vllm_port_on_and_leave_the_offline_masters_ten_alone(monkeypatch):
    base = next(port for port in range(20000, 60000, 50) if free(range(port, port + 40)))
    monkeypatch.setenv("VLLM_PORT", str(base))
    assert group_ports() == [base, base + 1, base + 2, base + 3, base + 4]
    monkeypatch.setenv("VLLM_DP_MASTER_PORT", str(base + 2))
    assert group_ports() == [base, base + 1, base + 12, base + 13, base + 14]


def free(ports):
    with zmq.Context() as context:
        sockets = [context.socket(zmq.PULL) for _ in ports]
        try:
            for socket, port in zip(sockets, ports, strict=True):
                socket.bind(f"tcp://*:{port}")
        except zmq.ZMQError:
            return False
        else:
            return True
        finally:
            for socket in sockets:
                socket.close()


@pytest.mark.parametrize(("version", "grace_s", "ready_s"), [("0.13", 5, 600), ("0.23", 5, 7), ("0.24", 2, 7)])
def test_time_limits_come_from_the_environment_since_their_release(version, grace_s, ready_s):
    env = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "2", "VLLM_ENGINE_READY_TIMEOUT_S": "7"}
    assert environment.stop_grace_s(env, wire_of(version)) == grace_s
    assert environment.ready_timeout_s(env, wire_of(version)) == ready_s


@pytest.fixture
def head(tmp_path):
    """Run a head's handshake for one remote rank; `said` are messages that wait for it when it begins."""

    def run(*, said=(), children=(), front_ends=()):
        address = f"ipc://{tmp_path}/head"
        with zmq.Context() as context, context.socket(zmq.DEALER) as rank:
            rank.setsockopt(zmq.IDENTITY, wire.identity(0))
            rank.setsockopt(zmq.LINGER, 0)
            rank.connect(address)
            for message in said:
                rank.send(message)
            machine = FrontEndHandshake(
                expected=[Expected(rank=0, local=False)],
                init=Init(addresses=Addresses(inputs=[], outputs=[]), parallel_config={}),
                remote_headless=True,
                config_hash=None,
            )
            run_handshake(
                machine,
                context=context,
                address=address,
                children=list(children),
                front_ends=front_ends,
                stopper=Stopper(),
                fault_list=(),
            )

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield run
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def ended(name, code):
    """A child that has ended."""
    child = fork(name, lambda: code, title=name, command=name)
    deadline = time.monotonic() + 10
    while child.exit_code() is None:
        assert time.monotonic() < deadline, f"{name} does not end"
        time.sleep(0.005)
    return child


def test_a_dead_rank_ends_the_start_even_when_a_hello_waits(head):
    with pytest.raises(StartError, match=r"Failed core proc\(s\): \{'EngineCore_DP1': 3\}$"):
        head(said=[hello(local=False, headless=True)], children=[ended("EngineCore_DP1", 3)])


def test_a_front_end_that_ends_during_the_start_is_told_apart_from_a_rank(head):
    with pytest.raises(StartError, match=r"^Start failed .* front end process\(es\) ended: \{'ApiServer_0': 2\}$"):
        head(front_ends=[ended("ApiServer_0", 2)])
    with pytest.raises(StartError, match=r"core proc\(s\): \{'DPCoordinator': 1\}, front end .* \{'ApiServer_0': 2\}$"):
        head(children=[ended("DPCoordinator", 1)], front_ends=[ended("ApiServer_0", 2)])


def test_a_rank_gives_up_when_the_head_does_not_answer_its_hello(monkeypatch, tmp_path):
    assert engine.INIT_TIMEOUT_S == 300
    monkeypatch.setattr(engine, "INIT_TIMEOUT_S", 0.1)
    options = parse_options(["m", "-dp", "2", "-dpl", "1", "-dpr", "1", "--headless"])
    config = EngineConfig(
        rank=1,
        launch=resolve(options, moe=False),
        options=options,
        handshake_address=f"ipc://{tmp_path}/nobody",
        local=False,
        headless=True,
    )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.bind(config.handshake_address)
        with pytest.raises(RuntimeError, match="within 5 minutes"):
            engine.run_engine(config)
