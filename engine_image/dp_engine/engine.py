"""How a rank starts: HELLO and INIT, once or twice; its group; the pretended load; the coordinator's word; READY.

What it then does is `engine_core` (protocol notes §2).
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from dp_engine import devices, environment, faults, handshake, logs, wire
from dp_engine.endpoints import connect_socket
from dp_engine.engine_core import EngineConfig, EngineCore
from dp_engine.modes import Launch
from dp_engine.options import Options
from dp_engine.rendezvous import Group, GroupBrokenError, join, reach_oneself
from dp_engine.versions import release_of, wire_of

INIT_TIMEOUT_S = 300

Socket = zmq.Socket[bytes]


def config_hash(options: Options, launch: Launch) -> str:
    """Hash over what all ranks of a lock-stepped group must have in common; stable over ranks and nodes."""
    if options.parallel_config_hash is not None:
        return options.parallel_config_hash
    common = {
        "version": release_of(options.version),
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "data_parallel_size": launch.size,
        "enable_expert_parallel": options.expert_parallel,
        "enable_eplb": options.eplb,
        "eplb_config": options.eplb_config,
        "enable_elastic_ep": options.elastic_ep,
        "elastic_ep_max_dp_size": options.elastic_ep_max_dp_size,
        "sync_interval_steps": options.sync_interval_steps or wire_of(options.version).sync_interval_steps,
        "cpu_distributed_timeout_s": options.cpu_distributed_timeout_s,
        "settings": options.group_settings,
    }
    return hashlib.sha256(msgspec.json.encode(common)).hexdigest()


class _Shake(Struct, frozen=True, kw_only=True):
    """One handshake: a node that serves by itself has two, with the head and with its own launcher."""

    socket: Socket
    local: bool
    headless: bool


def run_engine(config: EngineConfig) -> int:
    """Run one rank. Returns the exit code of its process."""
    rank, options = config.rank, config.options
    logs.info(f"Initializing a stand-in engine (v{options.version}) for {options.model}, DP rank {rank}")
    variable = devices.PLATFORMS[config.platform]
    logs.info(f"Visible devices: {variable}={os.environ.get(variable, '(unset)')}")
    logs.info(f"DP rank {rank} uses {config.platform} devices {','.join(config.devices)}")
    faults.sleep_if(options.faults, "slow-import", rank)
    faults.crash_if(options.faults, "crash-before-hello", rank)
    context: zmq.Context[Socket] = zmq.Context()
    shakes, init = _shake_hands(config, context)
    faults.crash_if(options.faults, "crash-after-hello", rank)
    try:
        group = _join_group(config, init.parallel_config)
    except GroupBrokenError as broken:
        logs.error(f"EngineCore failed to start: {broken}")
        return 1
    time.sleep(options.load_s)
    faults.sleep_if(options.faults, "slow-load", rank)
    logs.info(f"Model loading took {options.load_s:g} seconds")
    core = EngineCore(config, context, init.addresses, group)
    if faults.find(options.faults, "hang-before-ready", rank):
        logs.warning("FAULT hang-before-ready strikes")
        faults.sleep_for_ever()
    core.wait_for_coordinator()
    for shake in reversed(shakes):
        _say_ready(config, shake, init.addresses)
    try:
        core.serve()
    except Exception as failure:
        # vLLM's engines tell every front end before they die of an exception; a signal or exit tells nobody.
        logs.error("EngineCore encountered a fatal error.")
        logs.error(f"{type(failure).__name__}: {failure}")
        core.tell_dead()
        context.destroy(linger=4000)
        return 1
    context.destroy(linger=500)
    return 0


def _shake_hands(config: EngineConfig, context: zmq.Context[Socket]) -> tuple[list[_Shake], handshake.Init]:
    """HELLO and INIT, once or twice. The head's INIT counts; of the second one only inputs and outputs do."""
    head, init = _say_hello(config, context, config.handshake_address, local=config.local)
    if config.own_handshake_address is None:
        return [head], init
    own, second = _say_hello(config, context, config.own_handshake_address, local=True)
    addresses = msgspec.structs.replace(
        init.addresses, inputs=second.addresses.inputs, outputs=second.addresses.outputs
    )
    return [head, own], msgspec.structs.replace(init, addresses=addresses)


def _say_hello(
    config: EngineConfig, context: zmq.Context[Socket], address: str, *, local: bool
) -> tuple[_Shake, handshake.Init]:
    rank = config.rank
    socket = connect_socket(context, zmq.DEALER, address, identity=wire.identity(rank), linger_ms=5000)
    shake = _Shake(socket=socket, local=local, headless=config.headless)
    if fault := faults.find(config.options.faults, "garbage-frame", rank):
        faults.struck(fault)
        socket.send(b"\xc1garbage")
    hello = handshake.hello(local=local, headless=config.headless)
    socket.send(hello)
    logs.info(f"HELLO sent to {address} (local={local}, headless={config.headless})")
    if not socket.poll(INIT_TIMEOUT_S * 1000):
        raise RuntimeError("Did not receive response from front-end process within 5 minutes")
    init = handshake.decode_init(socket.recv())
    logs.info("INIT received")
    if fault := faults.find(config.options.faults, "duplicate-rank", rank):
        faults.struck(fault)
        socket.send(hello)
    return shake, init


def _join_group(config: EngineConfig, parallel_config: dict[str, Any]) -> Group | None:
    """Bring up the lock-stepped group at the address that INIT names; None for a dense model. Raises GroupBrokenError."""
    options = config.options
    if not config.launch.coordinated:
        alone = options.tensor_parallel_size * options.pipeline_parallel_size == 1
        if alone and wire_of(options.version).store_at_own_address:
            reach_oneself(host=environment.own_ip(os.environ), timeout_s=options.cpu_distributed_timeout_s)
        return None
    host, port = parallel_config.get("data_parallel_master_ip"), parallel_config.get("data_parallel_master_port")
    if not isinstance(host, str) or not isinstance(port, int):
        raise GroupBrokenError("INIT holds no data_parallel_master_ip and port: is the head's model dense?")
    size = int(parallel_config.get("data_parallel_size") or config.launch.size)
    group = join(rank=config.rank, size=size, host=host, port=port, timeout_s=options.cpu_distributed_timeout_s)
    logs.info(f"Joined the data-parallel group of {size} at {host}:{port}")
    return group


def _say_ready(config: EngineConfig, shake: _Shake, addresses: handshake.Addresses) -> None:
    options, family = config.options, wire_of(config.options.version)
    compares = config.launch.coordinated and family.ready_has_hash
    digest = config_hash(options, config.launch) if compares else None
    if fault := faults.find(options.faults, "wrong-hash", config.rank):
        faults.struck(fault)
        digest = "0" * 64
    elastic = {"coord_store_port": 0, "elastic_ep_max_dp_size": config.launch.size, "num_redundant_experts": 0}
    message = handshake.ready(
        local=shake.local,
        headless=shake.headless,
        config_hash=digest,
        blocks=wire.NUM_BLOCKS if family.ready_has_blocks else None,
        stats_address=addresses.frontend_stats_publish_address,
        elastic=elastic if options.elastic_ep and family.elastic_ready_keys else None,
    )
    shake.socket.send(message)
    shake.socket.close()
    logs.info("READY sent")
