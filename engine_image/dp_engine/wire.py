"""Bytes of the data plane: requests to engines and what comes back (protocol notes §4).

Arrays are positional and version-dependent; maps are keyed by field name. Everything here is pure.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any, Literal

import msgspec
from msgspec import Struct

ADD, ABORT, START_DP_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
COORDINATOR_READY = b"READY"
SUBSCRIBE = b"\x01"

encode = msgspec.msgpack.Encoder().encode


def _keep_extension(_code: int, data: memoryview) -> bytes:
    """Tensors and pickles travel as extension types; the stand-in never looks inside."""
    return bytes(data)


decode: Any = msgspec.msgpack.Decoder(ext_hook=_keep_extension).decode


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


FINISH_NAMES: dict[FinishReason, Literal["stop", "length", "abort"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


def identity(rank: int) -> bytes:
    """ZeroMQ routing id of a rank: two bytes, little-endian."""
    return rank.to_bytes(2, "little")


class Request(Struct, frozen=True, kw_only=True):
    """An ADD, whatever the layout it came in."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: dict[str, Any]
    client_index: int
    wave: int


def encode_add(
    *,
    request_id: str,
    external_id: str,
    prompt_token_ids: list[int],
    sampling: dict[str, Any],
    rank: int | None,
    client_index: int,
    wave: int,
) -> bytes:
    """ADD in the newest layout: 22 slots (0.31 and later), always all of them."""
    # 0-4 what to do, 5-8 arrival/lora/salt/rank, 9-10 embeddings, 11-14 client/wave/priority/trace,
    # 15 resumable, 16 external id, 17-18 reasoning, 19 abort_immediately, 20 session, 21 kv hints
    head = [request_id, prompt_token_ids, None, sampling, None]
    middle = [time.time(), None, None, rank, None, None, client_index, wave, 0, None]
    tail = [False, external_id, None, None, False, None, None]
    return encode([*head, *middle, *tail])


def decode_add(payload: bytes) -> Request:
    """Read an ADD of any known layout by sniffing: a float in slot 5 marks 0.17 and later.

    Raises msgspec.DecodeError on bytes that are no msgpack, ValueError on an array that is no request.
    """
    slots = decode(payload)
    if not isinstance(slots, list) or len(slots) < 9 or not isinstance(slots[0], str):
        raise ValueError(f"not a request array: {str(slots)[:200]}")
    new_family = isinstance(slots[5], float)
    # prompt_is_token_ids entered at slot 10 in 0.21 and moved client_index to 11; before 0.17 it was 11 as well.
    at_10 = new_family and len(slots) > 10 and isinstance(slots[10], int) and not isinstance(slots[10], bool)
    position = 10 if at_10 else 11
    client_index, wave = ([*slots[position : position + 2], 0, 0])[:2]
    sampling = slots[3] or {}
    if not isinstance(sampling, dict) or not isinstance(client_index, int) or not isinstance(wave, int):
        raise ValueError(f"not a request array: {str(slots)[:200]}")  # noqa: TRY004 - a value from the wire
    return Request(
        request_id=slots[0],
        prompt_token_ids=list(slots[1] or []),
        sampling=sampling,
        client_index=client_index,
        wave=wave,
    )


class Outputs(Struct, frozen=True, kw_only=True):
    """One message of an engine, to a front end or to the coordinator.

    `outputs` items are `[request id, new token ids, None, None, None, finish reason or None, stop reason or None]`:
    the slots that never moved. `stats` is a map by field name.
    """

    engine: int
    outputs: list[list[Any]] = []
    stats: dict[str, Any] | None = None
    utility: list[Any] | None = None
    finished: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None


def encode_outputs(message: Outputs, *, now: float) -> bytes:
    return encode(
        [
            message.engine,
            message.outputs,
            message.stats,
            now,
            message.utility,
            message.finished,
            message.wave_complete,
            message.start_wave,
        ]
    )


def decode_outputs(payload: bytes) -> Outputs:
    """Read an outputs array; items past slot 7 are ignored. Raises as decode_add."""
    slots = decode(payload)
    if not isinstance(slots, list) or not slots or not isinstance(slots[0], int):
        raise ValueError(f"not an outputs array: {str(slots)[:200]}")
    slots = [*slots, *[None] * 8]
    return Outputs(
        engine=slots[0],
        outputs=slots[1] or [],
        stats=slots[2],
        utility=slots[4],
        finished=slots[5],
        wave_complete=slots[6],
        start_wave=slots[7],
    )


def ready_response(
    *,
    rank: int,
    version: str,
    max_model_len: int,
    max_num_seqs: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    data_parallel_size: int,
    stats_address: str | None,
    instance_id: str,
) -> bytes:
    """First frame on every input socket since 0.20: a superset map that serves 0.20 to 0.33."""
    return encode(
        {
            "max_model_len": max_model_len,
            "num_gpu_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "dp_stats_address": stats_address,
            "dtype": "bfloat16",
            "vllm_version": version,
            "world_size": tensor_parallel_size * pipeline_parallel_size,
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": rank,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 2048,
            "instance_id": instance_id,
            "supports_lora": False,
            "max_loras": 0,
            "kv_cache_size_tokens": NUM_BLOCKS * BLOCK_SIZE,
            "kv_cache_max_concurrency": NUM_BLOCKS * BLOCK_SIZE / max_model_len,
        }
    )


NUM_BLOCKS = 8192
BLOCK_SIZE = 16
