"""Endpoints for operators of a server, which vLLM has with VLLM_SERVER_DEV_MODE=1 only: sleep, pause, caches, settings."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
from aiohttp import web

from dp_engine.client import EngineClient
from dp_engine.openai_schema import BadRequestError
from dp_engine.options import Options

DEV_MODE_ENV = "VLLM_SERVER_DEV_MODE"
# Path: (utility method of every rank, answer).
_ACTIONS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "/pause": ("pause_scheduler", {"status": "paused"}),
    "/resume": ("resume_scheduler", {"status": "resumed"}),
    "/reset_prefix_cache": ("reset_prefix_cache", {"success": True}),
    "/reset_mm_cache": ("reset_mm_cache", None),
}
_QUESTIONS = {"/is_sleeping": "is_sleeping", "/is_paused": "is_scheduler_paused"}
_MAX_SLEEP_LEVEL = 2


def add_routes(app: web.Application, client: EngineClient, options: Options) -> None:
    """Add them when the environment asks for them."""
    if os.environ.get(DEV_MODE_ENV, "0") in {"", "0"}:
        return

    async def ask_all(method: str, *arguments: object) -> list[Any]:
        return list(await asyncio.gather(*(client.call(rank, method, *arguments) for rank in client.ranks)))

    async def act(request: web.Request) -> web.Response:
        method, answer = _ACTIONS[request.path]
        await ask_all(method)
        return web.Response() if answer is None else web.json_response(answer)

    async def question(request: web.Request) -> web.Response:
        answers = await ask_all(_QUESTIONS[request.path])
        return web.json_response({request.path[1:]: bool(answers[0])})

    async def sleep(request: web.Request) -> web.Response:
        text = request.query.get("level", "1")
        if not text.isdecimal() or int(text) > _MAX_SLEEP_LEVEL:
            raise BadRequestError(f"level must be between 0 and {_MAX_SLEEP_LEVEL}, got {text}.", param="level")
        await ask_all("sleep", int(text))
        client.slept(int(text))
        return web.json_response({"status": "sleeping", "level": int(text)})

    async def wake_up(_request: web.Request) -> web.Response:
        await ask_all("wake_up")
        client.slept(0)
        return web.json_response({"status": "awake", "tags": None})

    async def server_info(_request: web.Request) -> web.Response:
        env = {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and "KEY" not in name}
        settings = {**msgspec.to_builtins(options), "api_key": None}
        return web.json_response({"vllm_config": settings, "vllm_env": env, "system_env": {}})

    for path in _ACTIONS:
        app.router.add_post(path, act)
    for path in _QUESTIONS:
        app.router.add_get(path, question)
    app.router.add_post("/sleep", sleep)
    app.router.add_post("/wake_up", wake_up)
    app.router.add_get("/server_info", server_info)
