"""Log probabilities of a pretended model: the chosen token first, then the runners-up, always the same for a token.

On the wire they are what vLLM's outputs hold in slot 2: arrays (type, shape, bytes) of token ids, log probabilities and
ranks, one row a token, the chosen token in column 0 and again among the best (protocol notes §4.4).
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from msgspec import Struct

_RAW_VIEW = 3  # extension type of an array's bytes


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """One token of an answer. `top` holds (token id, log probability), the most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def of_token(token: int, count: int) -> TokenLogprob:
    """The chosen token is always the most likely one; runners-up are its neighbours."""
    top = tuple(((token + place) % 256 if token < 256 else token, -0.125 * (1 + 8 * place)) for place in range(count))
    return TokenLogprob(token=token, logprob=-0.125, top=top)


def _array(code: str, shape: list[int], values: list[Any]) -> list[Any]:
    data = struct.pack(f"<{len(values)}{code}", *values)
    return [{"i": "<i4", "f": "<f4"}[code], shape, msgspec.msgpack.Ext(_RAW_VIEW, data)]


def pack(found: TokenLogprob) -> list[Any]:
    """Slot 2 of an outputs item that holds one token."""
    columns = 1 + len(found.top)
    ids = [found.token, *(token for token, _ in found.top)]
    values = [found.logprob, *(value for _, value in found.top)]
    return [_array("i", [1, columns], ids), _array("f", [1, columns], values), _array("i", [1], [1]), None]


def _rows(item: Any) -> list[list[Any]]:
    """Rows of an encoded array, or of plain lists, which releases before arrays used. Raises ValueError."""
    if len(item) == 3 and isinstance(item[0], str) and isinstance(item[2], bytes):
        kind, shape, data = item
        code = {"i4": "i", "i8": "q", "f4": "f", "f8": "d"}.get(kind[1:])
        if code is None or len(shape) != 2:
            raise ValueError(f"cannot read log probabilities of type {kind} and shape {shape}")
        values = list(struct.unpack(f"<{shape[0] * shape[1]}{code}", data))
        return [values[row * shape[1] : (row + 1) * shape[1]] for row in range(shape[0])]
    return [list(row) for row in item]


def unpack(slot: list[Any]) -> list[TokenLogprob]:
    """Read slot 2 of an outputs item; one result a token. Raises ValueError, struct.error or TypeError."""
    return [
        TokenLogprob(token=ids[0], logprob=values[0], top=tuple(zip(ids[1:], values[1:], strict=True)))
        for ids, values in zip(_rows(slot[0]), _rows(slot[1]), strict=True)
    ]
