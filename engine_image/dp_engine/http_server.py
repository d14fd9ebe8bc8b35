"""The OpenAI API and vLLM's service endpoints over aiohttp (protocol notes §8).

One handler per endpoint; what a completion *is* lives in `openai_schema`, where it comes from in `client`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from dp_engine import dev_api, logs
from dp_engine import openai_schema as schema
from dp_engine.client import EngineClient, EngineDeadError
from dp_engine.faults import RUNTIME, parse_fault
from dp_engine.logprobs import TokenLogprob
from dp_engine.metrics import SharedMetrics
from dp_engine.openai_schema import BadRequestError
from dp_engine.options import Options
from dp_engine.tokens import Detokenizer
from dp_engine.versions import wire_of
from dp_engine.wire import FINISH_NAMES, FinishReason

RANK_HEADER = "X-data-parallel-rank"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Piece(Struct, frozen=True, kw_only=True):
    """Some text of one choice; `finish` on the last piece."""

    index: int
    text: str
    tokens: int
    finish: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    offset: int = 0  # characters of this choice that came before


class Job(Struct, frozen=True, kw_only=True):
    """One completion call, ready to run: prompts × n choices."""

    id: str
    prompts: list[list[int]]
    samplings: list[dict[str, Any]]  # one per prompt
    n: int
    stops: list[str]
    position: int | None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


class Server:
    """What the handlers share."""

    def __init__(self, *, client: EngineClient, options: Options, metrics: SharedMetrics) -> None:
        self._client = client
        self._options = options
        self._metrics = metrics
        self._created = int(time.time())
        self._load = 0
        self.draining = False
        self._takes_rank_header = wire_of(options.version).rank_header
        self._max_model_len = min(options.max_model_len, client.max_model_len or options.max_model_len)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=64 * 2**20)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_post("/ping", self._health)
        app.router.add_get("/load", self._server_load)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_post("/scale_elastic_ep", self._scale)
        app.router.add_post("/is_scaling_elastic_ep", self._is_scaling)
        if self._options.fault_endpoint:
            app.router.add_post("/fault", self._inject_fault)
        dev_api.add_routes(app, self._client, self._options)
        return app

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in OpenAI's shape, the API key, and the request id."""
        try:
            key = self._options.api_key
            if key and request.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {key}":
                return _error("Unauthorized", code=401)
            if self.draining and request.method == "POST":
                return _error("Server shutting down", code=503)
            response = await handler(request)
        except BadRequestError as failure:
            return _error(failure.message, code=failure.code, param=failure.param)
        except EngineDeadError as failure:
            return _error(f"EngineCore encountered an issue: {failure}", code=500)
        except web.HTTPException as failure:
            return _error(failure.reason or str(failure.status), code=failure.status)
        except ConnectionError:
            raise  # the client has gone: nobody to answer
        except Exception as failure:
            # A rank's word that it cannot do what was called, or a mistake of ours.
            return _error(f"{type(failure).__name__}: {failure}", code=500)
        return response

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._client.dead is None else 503)

    async def _scale(self, request: web.Request) -> web.Response:
        """Only Ray can scale, so nothing but the present size succeeds: what vLLM with processes answers."""
        try:
            size = msgspec.json.decode(await request.read(), type=dict[str, int])["new_data_parallel_size"]
        except (msgspec.DecodeError, KeyError) as failure:
            raise BadRequestError(f"new_data_parallel_size must be a positive integer: {failure}") from None
        if size < 1:
            raise BadRequestError(f"new_data_parallel_size must be a positive integer, got {size}.")
        if size == self._options.data_parallel_size:
            return web.json_response({"message": f"Scaled to {size} data parallel engines"})
        return _error("Scale failed", code=500)

    async def _is_scaling(self, _request: web.Request) -> web.Response:
        return web.json_response({"is_scaling_elastic_ep": False})

    async def _inject_fault(self, request: web.Request) -> web.Response:
        """For tests: `{"fault": "crash:ranks=1,seconds=2"}` strikes ranks that this server uses."""
        try:
            body = msgspec.json.decode(await request.read(), type=dict[str, str])
            fault = parse_fault(body["fault"])
        except (msgspec.DecodeError, KeyError, ValueError) as failure:
            raise BadRequestError(f"no fault: {failure}") from None
        if fault.kind not in RUNTIME:
            raise BadRequestError(f"{fault.kind} cannot come at run time; these can: {', '.join(sorted(RUNTIME))}")
        if fault.on_signal:
            raise BadRequestError("on=signal belongs to --fault: this call is the signal")
        ranks = [rank for rank in self._client.ranks if fault.hits(rank)]
        await asyncio.gather(*(self._client.call(rank, "inject_fault", body["fault"]) for rank in ranks))
        return web.json_response({"ranks": ranks})

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self._options.version})

    async def _server_load(self, _request: web.Request) -> web.Response:
        return web.json_response({"server_load": self._load if self._options.server_load_tracking else 0})

    async def _metrics_page(self, _request: web.Request) -> web.Response:
        text = self._metrics.render(model_name=self._options.served_model_names[0])
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _models(self, _request: web.Request) -> web.Response:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": self._options.model,
                "parent": None,
                "max_model_len": self._max_model_len,
            }
            for name in self._options.served_model_names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        call = schema.decode_request(await request.read(), schema.CompletionRequest)
        prompts = schema.prompts_of(call.prompt)
        max_tokens = 16 if call.max_tokens is None else call.max_tokens
        job = self._job(request, call, prompts, max_tokens, prefix="cmpl")
        echoes = [Detokenizer().feed(prompt, final=True) if call.echo else "" for prompt in prompts]

        def choice(piece: Piece, *, first: bool) -> dict[str, Any]:
            return {
                "index": piece.index,
                "text": (echoes[piece.index // job.n] if first else "") + piece.text,
                "logprobs": piece.logprobs and schema.completion_logprobs(piece.logprobs, offset=piece.offset),
                "finish_reason": piece.finish,
                "stop_reason": piece.stop_reason,
            }

        envelope = self._envelope(job, call.model, "text_completion")
        if call.stream:
            return await self._stream(request, job, call, envelope, choice)
        pieces = await self._whole(job)
        body = {**envelope, "choices": [choice(piece, first=True) for piece in pieces], "usage": _usage(job, pieces)}
        return self._reply(request, body)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        call = schema.decode_request(await request.read(), schema.ChatRequest)
        prompt = schema.chat_prompt(call.messages)
        limit = call.max_completion_tokens if call.max_completion_tokens is not None else call.max_tokens
        job = self._job(request, call, [prompt], limit, prefix="chatcmpl")

        def delta(piece: Piece, *, first: bool) -> dict[str, Any]:
            content: dict[str, Any] = {"role": "assistant"} if first else {}
            return {
                "index": piece.index,
                "delta": {**content, "content": piece.text},
                "logprobs": piece.logprobs and schema.chat_logprobs(piece.logprobs),
                "finish_reason": piece.finish,
                "stop_reason": piece.stop_reason,
            }

        if call.stream:
            envelope = self._envelope(job, call.model, "chat.completion.chunk")
            return await self._stream(request, job, call, envelope, delta)
        pieces = await self._whole(job)
        choices = [
            {
                "index": piece.index,
                "message": {"role": "assistant", "content": piece.text, "tool_calls": []},
                "logprobs": piece.logprobs and schema.chat_logprobs(piece.logprobs),
                "finish_reason": piece.finish,
                "stop_reason": piece.stop_reason,
            }
            for piece in pieces
        ]
        envelope = self._envelope(job, call.model, "chat.completion")
        return self._reply(request, {**envelope, "choices": choices, "usage": _usage(job, pieces)})

    def _job(
        self,
        request: web.Request,
        call: schema.Sampling,
        prompts: list[list[int]],
        max_tokens: int | None,
        *,
        prefix: str,
    ) -> Job:
        """Check what only this server knows: model name, context length, rank. Raises BadRequestError."""
        if call.model is not None and call.model not in self._options.served_model_names:
            raise BadRequestError(f"The model `{call.model}` does not exist.", param="model", code=404)
        samplings = [
            schema.sampling_of(
                call, prompt_tokens=len(prompt), max_tokens=max_tokens, max_model_len=self._max_model_len
            )
            for prompt in prompts
        ]
        request_id = request.headers.get("X-Request-Id") or _random_id()
        return Job(
            id=f"{prefix}-{request_id}",
            prompts=prompts,
            samplings=samplings,
            n=call.n or 1,
            stops=schema.stop_strings(call),
            position=self._chosen_rank(request),
        )

    def _chosen_rank(self, request: web.Request) -> int | None:
        text = request.headers.get(RANK_HEADER)
        if text is None or not self._takes_rank_header:
            return None
        try:
            rank = int(text)
        except ValueError:
            return None  # vLLM ignores what is no number
        if not 0 <= rank < self._client.engine_count:
            raise BadRequestError(f"data_parallel_rank {rank} is out of range [0, {self._client.engine_count}).")
        return rank

    def _envelope(self, job: Job, model: str | None, kind: str) -> dict[str, Any]:
        name = model or self._options.served_model_names[0]
        return {"id": job.id, "object": kind, "created": int(time.time()), "model": name}

    def _reply(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(body), content_type="application/json", headers=self._extra_headers(request)
        )

    def _extra_headers(self, request: web.Request) -> dict[str, str]:
        if not self._options.request_id_headers:
            return {}
        return {"X-Request-Id": request.headers.get("X-Request-Id") or _random_id()}

    async def _choice(self, job: Job, index: int) -> AsyncIterator[Piece]:
        """Pieces of one choice. Leaving early aborts its request at the engine."""
        prompt, sampling = job.prompts[index // job.n], dict(job.samplings[index // job.n])
        if job.n > 1 and "seed" in sampling:
            sampling["seed"] += index % job.n
        elif job.n > 1:
            sampling["seed"] = index % job.n
        detokenizer, watch = Detokenizer(), schema.StopWatch(job.stops)
        deltas = self._client.generate(f"{job.id}-{index}", prompt, sampling, position=job.position)
        shown = 0
        try:
            async for delta in deltas:
                final = delta.finish is not None
                text, stop = watch.feed(detokenizer.feed(delta.token_ids, final=final), final=final)
                finish = None
                if stop is not None:
                    finish = "stop"
                elif delta.finish is not None:
                    finish = FINISH_NAMES[delta.finish]
                    if delta.finish is FinishReason.ERROR:
                        raise EngineDeadError("the engine reported an error")
                yield Piece(
                    index=index,
                    text=text,
                    tokens=len(delta.token_ids),
                    finish=finish,
                    stop_reason=delta.stop_reason if stop is None else stop,
                    logprobs=delta.logprobs,
                    offset=shown,
                )
                if stop is not None:
                    return
                shown += len(text)
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]

    async def _whole(self, job: Job) -> list[Piece]:
        """All choices, each as one piece."""

        async def collect(index: int) -> Piece:
            pieces = [piece async for piece in self._choice(job, index)]
            return Piece(
                index=index,
                text="".join(piece.text for piece in pieces),
                tokens=sum(piece.tokens for piece in pieces),
                finish=pieces[-1].finish,
                stop_reason=pieces[-1].stop_reason,
                logprobs=[found for piece in pieces for found in piece.logprobs or ()] or None,
            )

        self._load += 1
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(collect(index)) for index in range(len(job.prompts) * job.n)]
        except* Exception as failures:
            raise failures.exceptions[0] from None  # the others were cancelled for its sake
        finally:
            self._load -= 1
        return [task.result() for task in tasks]

    async def _stream(
        self,
        request: web.Request,
        job: Job,
        call: schema.Sampling,
        envelope: dict[str, Any],
        shape: Callable[..., dict[str, Any]],
    ) -> web.StreamResponse:
        """Server-sent events, one chunk per piece, then usage if asked for, then [DONE]."""
        queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for piece in self._choice(job, index):
                    queue.put_nowait(piece)
            except Exception as failure:
                queue.put_nowait(failure)  # whatever it is, the reader must not wait for more
            queue.put_nowait(None)

        self._client.check_alive()
        headers = {"Content-Type": "text/event-stream; charset=utf-8", **self._extra_headers(request)}
        response = web.StreamResponse(headers=headers)
        self._load += 1
        tasks = [asyncio.create_task(pump(index)) for index in range(len(job.prompts) * job.n)]
        try:
            await response.prepare(request)
            await self._send_pieces(response, job, call, envelope, shape, queue, len(tasks))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            self._load -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return response

    async def _send_pieces(
        self,
        response: web.StreamResponse,
        job: Job,
        call: schema.Sampling,
        envelope: dict[str, Any],
        shape: Callable[..., dict[str, Any]],
        queue: asyncio.Queue[Piece | Exception | None],
        open_choices: int,
    ) -> None:
        options = call.stream_options or schema.StreamOptions()
        begun: set[int] = set()
        tokens = 0
        while open_choices:
            item = await queue.get()
            if item is None:
                open_choices -= 1
                continue
            if isinstance(item, Exception):
                message = f"EngineCore encountered an issue: {item or type(item).__name__}"
                logs.error(f"HTTP 500 in a stream: {message}")
                await _event(response, schema.error_body(message, code=500))
                return
            tokens += item.tokens
            first = item.index not in begun
            begun.add(item.index)
            if not item.text and item.finish is None and not first and not item.logprobs:
                continue  # held back, or part of a character
            chunk = {**envelope, "choices": [shape(item, first=first)]}
            if options.include_usage:
                chunk["usage"] = (
                    schema.usage(prompt_tokens=job.prompt_tokens, completion_tokens=tokens)
                    if options.continuous_usage_stats
                    else None
                )
            await _event(response, chunk)
        if options.include_usage:
            total = schema.usage(prompt_tokens=job.prompt_tokens, completion_tokens=tokens)
            await _event(response, {**envelope, "choices": [], "usage": total})


def _usage(job: Job, pieces: list[Piece]) -> dict[str, int]:
    completion_tokens = sum(piece.tokens for piece in pieces)
    return schema.usage(prompt_tokens=job.prompt_tokens, completion_tokens=completion_tokens)


def _random_id() -> str:
    return os.urandom(16).hex()


def _error(message: str, *, code: int, param: str | None = None) -> web.Response:
    if code >= 500:
        logs.error(f"HTTP {code}: {message}")
    return web.json_response(schema.error_body(message, code=code, param=param), status=code)


async def _event(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(data) + b"\n\n")
