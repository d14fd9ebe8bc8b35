"""Messages of the startup handshake, and both sides' state machines: pure (protocol notes §2).

The front end's machine makes every check of §2.5 in vLLM's order: identity, decode, local, headless, state, hash.
An exception from it is meant to end the process, as it does in vLLM.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct

from dp_engine import wire


class Addresses(Struct, frozen=True, kw_only=True):
    """Where engines find everything; one input and one output per API server, in the same order."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class Init(Struct, frozen=True, kw_only=True):
    """What the front end answers to HELLO. `parallel_config` is empty for dense models."""

    addresses: Addresses
    parallel_config: dict[str, Any]


_decode_init = msgspec.msgpack.Decoder(Init).decode


def decode_init(frame: bytes) -> Init:
    """Raises msgspec.ValidationError or DecodeError, as vLLM's typed decoder does: maps only, both keys required."""
    return _decode_init(frame)


def hello(*, local: bool, headless: bool) -> bytes:
    return wire.encode({"status": "HELLO", "local": local, "headless": headless})


def ready(
    *,
    local: bool,
    headless: bool,
    config_hash: str | None = None,
    blocks: int | None = None,
    stats_address: str | None = None,
    elastic: dict[str, int] | None = None,
) -> bytes:
    """READY. Up to 0.19 with `blocks` and the stats address; the hash only in groups that compare it (§2.2)."""
    message: dict[str, Any] = {"status": "READY", "local": local, "headless": headless}
    if blocks is not None:
        message |= {"num_gpu_blocks": blocks, "dp_stats_address": stats_address}
    if config_hash is not None:
        message["parallel_config_hash"] = config_hash
    return wire.encode(message | (elastic or {}))


class State(Enum):
    NEW = "NEW"
    CONNECTED = "CONNECTED"
    READY = "READY"


class HandshakeError(RuntimeError):
    """A frame that ends the start."""


class Expected(Struct, frozen=True, kw_only=True):
    """What the front end knows about a rank before it speaks."""

    rank: int
    local: bool


class FrontEndHandshake:
    """The head's side: feed it frames, send what it returns, until `done`."""

    def __init__(
        self,
        *,
        expected: list[Expected],
        init: Init,
        remote_headless: bool,
        config_hash: str | None,
        ready_has_blocks: bool = False,
        never: int = 0,
    ) -> None:
        """`remote_headless`: internal load balancing. `config_hash` None: READYs are not compared.

        `ready_has_blocks`: up to 0.19, where READY brings the sizes of caches and the coordinator's address.
        `never`: ranks that are waited for and cannot come, which is what a negative number of local ranks asks for.
        """
        self.blocks = 0  # of all ranks
        self.stats_address = init.addresses.frontend_stats_publish_address
        self._expected = {wire.identity(engine.rank): engine for engine in expected}
        self._states = {engine.rank: State.NEW for engine in expected}
        self._init = wire.encode(init)
        self._not_ready = len(expected) + never
        self._remote_headless = remote_headless
        self._config_hash = config_hash
        self._ready_has_blocks = ready_has_blocks

    @property
    def done(self) -> bool:
        return self._not_ready == 0

    def waiting_for(self) -> str:
        """For the log: how many ranks have yet to connect and to start, and the first of them."""
        parts: list[str] = []
        for state, word in ((State.NEW, "connect"), (State.CONNECTED, "start")):
            ranks = [engine for engine in self._expected.values() if self._states[engine.rank] is state]
            local = sum(engine.local for engine in ranks)
            if ranks:
                first = ", ".join(str(engine.rank) for engine in ranks[:8])
                more = ", …" if len(ranks) > 8 else ""
                parts.append(
                    f"{local} local, {len(ranks) - local} remote core engine proc(s) to {word} (ranks {first}{more})"
                )
        return "; ".join(parts)

    def receive(self, frames: list[bytes]) -> list[bytes]:
        """Take one multipart message; returns the answer's frames, empty when there is none.

        Raises HandshakeError, msgspec.DecodeError, KeyError or ValueError: the start has failed.
        """
        identity, payload = frames  # an extra frame ends the start here, as in vLLM
        rank = int.from_bytes(identity, "little")
        engine = self._expected.get(identity)
        if engine is None:
            raise HandshakeError(f"Message from engine with unexpected data parallel rank: {rank}")
        message = wire.decode(payload)
        status, local, headless = message["status"], message["local"], message["headless"]
        side = "local" if local else "remote"
        if local != engine.local:
            wanted = "local" if engine.local else "remote"
            raise HandshakeError(f"{status} message from {side} engine {rank}, expected it to be {wanted}")
        # Only what is remote to this front end has another launcher, whose kind must fit.
        if not local and headless != self._remote_headless:
            if self._remote_headless:
                raise HandshakeError(
                    f"Remote engine {rank} must use --headless unless in external or hybrid dp lb mode"
                )
            raise HandshakeError(f"Remote engine {rank} must not use --headless in external or hybrid dp lb mode")
        state = self._states[rank]
        if status == "HELLO" and state is State.NEW:
            self._states[rank] = State.CONNECTED
            return [identity, self._init]
        if status == "READY" and state is State.CONNECTED:
            if self._ready_has_blocks:
                self.blocks += message["num_gpu_blocks"]
                self.stats_address = self.stats_address or message.get("dp_stats_address")
            theirs = message.get("parallel_config_hash")
            if self._config_hash is not None and theirs != self._config_hash:
                raise HandshakeError(
                    f"Configuration mismatch detected for engine {rank}. Worker hash: {theirs}, expected hash: "
                    f"{self._config_hash}. Start all workers with the same command-line arguments"
                )
            self._states[rank] = State.READY
            self._not_ready -= 1
            return []
        raise HandshakeError(f"Unexpected {status} message for {side} engine {rank} in {state.name} state.")
