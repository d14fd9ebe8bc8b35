"""Bytes of the data plane: requests to engines and what comes back (protocol notes §4).

Arrays are positional and version-dependent; maps are keyed by field name. Everything here is pure.
"""

from __future__ import annotations

import struct
import time
from enum import IntEnum
from typing import Any, Literal

import msgspec
from msgspec import Struct

from dp_engine.tokens import END_OF_TEXT

ADD, ABORT, START_DP_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
COORDINATOR_READY = b"READY"
SCALE_NOTICE = "SCALE_ELASTIC_EP"
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


FINISH_NAMES: dict[FinishReason, Literal["stop", "length", "abort", "error", "repetition"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.REPETITION: "repetition",
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
    layout: str = "0.31",
) -> bytes:
    """ADD in a release's layout, always with all slots; `layout` is `Wire.add_layout` (protocol notes §4.3)."""
    what = [request_id, prompt_token_ids, None, sampling, None]
    arrival = [time.time(), None, None, rank]  # then lora, cache salt, rank
    where = [client_index, wave, 0, None]  # then priority, trace headers
    external: list[Any] = [external_id]
    match layout:
        # Up to 0.16 the end-of-text id comes before the arrival time; what follows `where` grew release by release.
        case "0.10.2":
            slots = [*what, END_OF_TEXT, *arrival, *where]
        case "0.11" | "0.14" | "0.15" | "0.16":
            tail = {"0.11": [], "0.14": external, "0.15": [False, *external], "0.16": [False, *external, None]}[layout]
            slots = [*what, END_OF_TEXT, *arrival, None, *where, *tail]  # None: prompt embeddings
        case "0.17" | "0.20":
            slots = [*what, *arrival, None, *where, False, *external, None, *[None] * (layout == "0.20")]
        case "0.21" | "0.28" | "0.31":
            # From here on also whether each item of a mixed prompt is a token id.
            tail = [False, *external, None, None, False, *[None] * {"0.21": 0, "0.28": 1, "0.31": 2}[layout]]
            slots = [*what, *arrival, None, None, *where, *tail]
        case _:
            raise ValueError(f"unknown request layout {layout}")
    return encode(slots)


def decode_add(payload: bytes) -> Request:
    """Read an ADD of any known layout by sniffing: a number in slot 10 can only be the client index.

    Raises msgspec.DecodeError on bytes that are no msgpack, ValueError on an array that is no request.
    """
    slots = decode(payload)
    if not isinstance(slots, list) or len(slots) < 9 or not isinstance(slots[0], str):
        raise ValueError(f"not a request array: {str(slots)[:200]}")
    # It was at 10 in 0.10.2 and from 0.17 to 0.20; otherwise embeddings or a prompt's kinds of items moved it to 11.
    at_10 = len(slots) > 10 and isinstance(slots[10], int) and not isinstance(slots[10], bool)
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

    `outputs` items are `[request id, new token ids, log probabilities or None, None, None, finish reason or None,
    stop reason or None]`: the slots that never moved. `stats` is a map by field name.
    """

    engine: int
    outputs: list[list[Any]] = []
    stats: dict[str, Any] | None = None
    utility: list[Any] | None = None
    finished: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None


def encode_outputs(message: Outputs, *, now: float, weight_version_slot: bool = False) -> bytes:
    """The outputs array: eight slots, nine since 0.32. `now` is the engine's monotonic clock."""
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
            *[None] * weight_version_slot,
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


# Keys of the first input frame in the order in which releases added them; `Wire.first_frame_keys` says how many.
READY_RESPONSE_KEYS = (
    *("max_model_len", "num_gpu_blocks", "dp_stats_address", "dtype", "block_size", "vllm_version"),
    *("world_size", "data_parallel_size", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
    *("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_rank"),
    *("max_num_seqs", "max_num_batched_tokens", "instance_id", "supports_lora", "max_loras"),
)


def ready_response(
    *,
    keys: int = len(READY_RESPONSE_KEYS),
    rank: int,
    version: str,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    data_parallel_size: int,
    stats_address: str | None,
    instance_id: str,
) -> bytes:
    """First frame on every input socket: a map since 0.20, empty before (`keys` 0)."""
    if keys == 0:
        return b""
    values: dict[str, Any] = {
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
        "max_num_batched_tokens": max_num_batched_tokens,
        "instance_id": instance_id,
        "supports_lora": False,
        "max_loras": 0,
        "kv_cache_size_tokens": NUM_BLOCKS * BLOCK_SIZE,
        "kv_cache_max_concurrency": NUM_BLOCKS * BLOCK_SIZE / max_model_len,
    }
    return encode({key: values[key] for key in READY_RESPONSE_KEYS[:keys]})


# What reading a message of any shape may raise: numbers may be infinite, and nesting deeper than Python follows.
MALFORMED = (
    *(msgspec.DecodeError, struct.error, ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, RecursionError),
)

NUM_BLOCKS = 8192
BLOCK_SIZE = 16
