"""vLLM's environment variables that touch the launch (protocol notes §1.2), read and checked in one place.

`modes` reads VLLM_DP_*, `endpoints` uses VLLM_RPC_BASE_PATH, `dev_api` VLLM_SERVER_DEV_MODE; the variables of devices are
in `devices`, those of Ray do nothing here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from dp_engine import logs
from dp_engine.versions import Wire

PORT_ENV = "VLLM_PORT"
HOST_IP_ENV = "VLLM_HOST_IP"
RPC_BASE_PATH_ENV = "VLLM_RPC_BASE_PATH"
MASTER_PORT_ENV = "VLLM_DP_MASTER_PORT"
READY_TIMEOUT_ENV = "VLLM_ENGINE_READY_TIMEOUT_S"
SHUTDOWN_TIMEOUT_ENV = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
SCALE_UP_ENV = "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"
KEEP_ALIVE_ENV = "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"
RUST_FRONT_END_ENV = "VLLM_USE_RUST_FRONTEND"
_NUMBERS = (READY_TIMEOUT_ENV, SHUTDOWN_TIMEOUT_ENV, KEEP_ALIVE_ENV, MASTER_PORT_ENV, "VLLM_SERVER_DEV_MODE")
_RESERVED_PORTS = 10
_MAX_FOLDER = 90  # of a socket's 107 bytes; 17 are the name


def check(env: Mapping[str, str]) -> None:
    """Raises ValueError where vLLM cannot read a variable; warns of one that is ignored."""
    port = env.get(PORT_ENV, "")
    if port and not port.isdecimal():
        # A Kubernetes Service called vllm injects VLLM_PORT=tcp://..., which vLLM takes for its own.
        raise ValueError(f"{PORT_ENV} {port!r} appears to be a URI: set enableServiceLinks to false, or unset it")
    for name in _NUMBERS:
        if (value := env.get(name, "")) and not value.isdecimal():
            raise ValueError(f"{name} must be a number, not {value!r}")
    if env.get(SCALE_UP_ENV, "0") not in {"", "0"}:
        raise ValueError(f"{SCALE_UP_ENV} asks for a rank that joins a running group: the stand-in engine has none")
    folder = env.get(RPC_BASE_PATH_ENV)
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise ValueError(f"{RPC_BASE_PATH_ENV} {folder!r} is no folder that can be written to")
    if folder and len(folder) > _MAX_FOLDER:
        raise ValueError(f"{RPC_BASE_PATH_ENV} {folder!r} is too long: sockets there have room for {_MAX_FOLDER} bytes")
    if env.get(RUST_FRONT_END_ENV, "0") not in {"", "0"}:
        logs.warning(f"{RUST_FRONT_END_ENV} is ignored: the stand-in engine has one front end")
    if "HOST_IP" in env and HOST_IP_ENV not in env:
        logs.warning(f"The environment variable HOST_IP is ignored: {HOST_IP_ENV} says which address is this machine's")


def own_ip(env: Mapping[str, str]) -> str:
    """Address of this machine: VLLM_HOST_IP whatever it says, else that of the default route, else 0.0.0.0."""
    if env.get(HOST_IP_ENV):
        return env[HOST_IP_ENV]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))  # looks up the route, sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "0.0.0.0"


def base_port(env: Mapping[str, str]) -> int:
    """Where the search for free ports begins; 0: anywhere."""
    return int(env.get(PORT_ENV) or 0)


def reserved_ports(env: Mapping[str, str]) -> range:
    """Ports that an offline group's rank 0 may use, so nobody else does."""
    port = int(env.get(MASTER_PORT_ENV) or 0)
    return range(port, port + _RESERVED_PORTS) if port else range(0)


def ready_timeout_s(env: Mapping[str, str], wire: Wire) -> float:
    """How long a front end waits for the next engine's first frame."""
    return float(env.get(READY_TIMEOUT_ENV) or 600) if wire.ready_timeout_from_env else 600.0


def stop_grace_s(env: Mapping[str, str], wire: Wire) -> float:
    """How long a child that was told to stop has before it is killed, beyond --shutdown-timeout."""
    return float(env.get(SHUTDOWN_TIMEOUT_ENV) or 5) if wire.stop_grace_from_env else 5.0


def keeps_alive(env: Mapping[str, str]) -> bool:
    """Whether a front end stays, unhealthy, after an engine has died."""
    return env.get(KEEP_ALIVE_ENV, "0") not in {"", "0"}
