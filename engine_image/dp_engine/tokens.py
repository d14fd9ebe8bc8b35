"""A byte tokenizer and a deterministic writer in place of a model.

A token id below 256 is that byte. What a prompt is answered with depends only on its token ids and the seed, so
every rank gives the same answer and a test can compare two of them.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
from collections.abc import Iterable, Iterator

END_OF_TEXT = 257
_WORDS = (  # noqa: SIM905 - a line of words
    "a all an and as at be by can data each every for from group head in is it last many model more new no node not "
    "of on one or part rank ready so some step that the then there this time to token two under wave we while with word"
).split()


def encode_text(text: str) -> list[int]:
    return list(text.encode())


class Detokenizer:
    """Token ids in, text out, never half a character. Ids that are no bytes are shown as `<id>`."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int], *, final: bool = False) -> str:
        parts: list[str] = []
        for token in token_ids:
            if 0 <= token < 256:
                parts.append(self._utf8.decode(bytes([token])))
            elif token != END_OF_TEXT:
                parts.append(f"<{token}>")
        if final:
            parts.append(self._utf8.decode(b"", final=True))
        return "".join(parts)


def _stream_key(prompt_token_ids: list[int], seed: int | None) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(prompt_token_ids).encode())
    digest.update(repr(seed).encode())
    return digest.digest()


def write(prompt_token_ids: list[int], seed: int | None) -> Iterator[int]:
    """Endless words for this prompt and seed, as byte tokens."""
    key = _stream_key(prompt_token_ids, seed)
    for block in itertools.count():
        for byte in hashlib.blake2b(block.to_bytes(8, "little"), key=key).digest():
            yield from b" "
            yield from _WORDS[byte % len(_WORDS)].encode()


def natural_length(prompt_token_ids: list[int], seed: int | None) -> int:
    """Tokens after which the text ends by itself unless the request ignores that: 256 to 511."""
    return 256 + _stream_key(prompt_token_ids, seed)[0]
