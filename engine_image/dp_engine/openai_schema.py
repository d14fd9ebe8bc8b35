"""Requests and responses of the OpenAI API as this engine understands them: pure, JSON in and JSON out."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from dp_engine.logprobs import TokenLogprob
from dp_engine.tokens import END_OF_TEXT, Detokenizer, encode_text

MAX_LOGPROBS = 20  # vLLM's default of --max-logprobs
Prompt = str | list[str | int | list[int]]


class BadRequestError(Exception):
    """The client's mistake; `code` is the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, code: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(Struct, frozen=True, kw_only=True):
    """Parameters common to both kinds of completions; unknown fields are ignored."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def top_count(self) -> int | None:
        """How many log probabilities a token shows; None: none at all."""
        return None


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    prompt: Prompt
    echo: bool | None = False
    logprobs: int | None = None

    @property
    def top_count(self) -> int | None:
        """How many log probabilities a token shows; None: none at all."""
        return self.logprobs


class ContentPart(Struct, frozen=True):
    type: str = "text"
    text: str = ""


class Message(Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None

    @property
    def top_count(self) -> int | None:
        """How many log probabilities a token shows; None: none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


_Kind = TypeVar("_Kind", bound=Sampling)


def decode_request(body: bytes, kind: type[_Kind]) -> _Kind:
    """Raises BadRequestError, saying which field is wrong."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as failure:
        raise BadRequestError(str(failure)) from None
    except msgspec.DecodeError as failure:
        raise BadRequestError(f"The body is not valid JSON: {failure}") from None
    _check(request)
    return request


def _check(request: Sampling) -> None:
    if request.max_tokens is not None and request.max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {request.max_tokens}.", param="max_tokens")
    if not 1 <= (1 if request.n is None else request.n) <= 128:
        raise BadRequestError(f"n must be between 1 and 128, got {request.n}.", param="n")
    if request.temperature is not None and request.temperature < 0:
        raise BadRequestError(f"temperature must be non-negative, got {request.temperature}.", param="temperature")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise BadRequestError(f"top_p must be in (0, 1], got {request.top_p}.", param="top_p")
    if not 0 <= (request.top_count or 0) <= MAX_LOGPROBS:
        raise BadRequestError(
            f"Requested sample logprobs of {request.top_count}, which is not between 0 and {MAX_LOGPROBS}.",
            param="logprobs",
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("Stream options can only be defined when `stream=True`.", param="stream_options")


def stop_strings(request: Sampling) -> list[str]:
    stops = request.stop
    if stops is None:
        return []
    return [stops] if isinstance(stops, str) else [text for text in stops if text]


def prompts_of(prompt: Prompt) -> list[list[int]]:
    """Token ids of each prompt. Raises BadRequestError when there is none."""
    if isinstance(prompt, str):
        return [encode_text(prompt)]
    if not prompt or prompt == [[]]:
        raise BadRequestError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if ids:
        if len(ids) != len(prompt):
            raise BadRequestError("prompt mixes token ids with other items.", param="prompt")
        return [ids]
    return [encode_text(item) if isinstance(item, str) else item for item in prompt if not isinstance(item, int)]


def chat_prompt(messages: list[Message]) -> list[int]:
    """The stand-in's chat template: one line per message, then the assistant's turn. Raises BadRequestError."""
    if not messages:
        raise BadRequestError("messages must not be empty.", param="messages")
    lines: list[str] = []
    for message in messages:
        content = message.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        lines.append(f"{message.role}: {text}\n")
    return encode_text("".join(lines) + "assistant:")


def sampling_of(request: Sampling, *, prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> dict[str, Any]:
    """Sampling parameters as engines take them: a map without defaults. `max_tokens` None: whatever fits.

    Raises BadRequestError when prompt and answer do not fit into the model's context.
    """
    room = max_model_len - prompt_tokens
    if room < (max_tokens or 1):
        raise BadRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{max_tokens or 1} output tokens and your prompt contains {prompt_tokens} input tokens."
        )
    sampling: dict[str, Any] = {
        "max_tokens": room if max_tokens is None else max_tokens,
        "output_kind": 1,  # deltas
        "_eos_token_id": END_OF_TEXT,
    }
    optional = {
        "seed": request.seed,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop_token_ids": request.stop_token_ids,
        "min_tokens": request.min_tokens or None,
        "ignore_eos": request.ignore_eos or None,
        "logprobs": request.top_count,
    }
    sampling.update({key: value for key, value in optional.items() if value is not None})
    return sampling


class StopWatch:
    """Finds stop strings in text that comes in pieces; holds back what may yet become one."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""
        self._hold = max((len(stop) for stop in stops), default=1) - 1

    def feed(self, text: str, *, final: bool) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that was met or None)."""
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, stop = min(hits)
            return self._held[:at], stop
        keep = 0 if final else min(self._hold, len(self._held))
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None


def _token_text(token: int) -> str:
    return Detokenizer().feed([token], final=True)


def completion_logprobs(found: list[TokenLogprob], *, offset: int) -> dict[str, Any]:
    """`logprobs` of a completion's choice; `offset` is how many characters came before."""
    tokens = [_token_text(item.token) for item in found]
    offsets = [offset + sum(map(len, tokens[:position])) for position in range(len(tokens))]
    return {
        "text_offset": offsets,
        "token_logprobs": [item.logprob for item in found],
        "tokens": tokens,
        "top_logprobs": [{_token_text(token): value for token, value in item.top} or None for item in found],
    }


def chat_logprobs(found: list[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text = _token_text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    content = [
        {**entry(item.token, item.logprob), "top_logprobs": [entry(token, value) for token, value in item.top]}
        for item in found
    ]
    return {"content": content}


def usage(*, prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


def error_body(message: str, *, code: int, param: str | None = None) -> dict[str, Any]:
    """Error body as vLLM sends it and the OpenAI clients read it."""
    kind = _ERROR_TYPES.get(code) or HTTPStatus(code).phrase
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
