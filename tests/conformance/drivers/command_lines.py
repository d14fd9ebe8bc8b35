"""What one release of vLLM does with command lines: started, or refused before anything starts.

A case of `release.py`: `{"kind": "command_lines", "lines": [["dense", "-dp 4"], …], "folder": "/tmp/models"}`. vLLM's
own parser, its `serve` command, its configuration and its launcher run, up to where the launcher would start processes
of ranks. The models are folders with a configuration and a tokenizer, made here. Prints `{"line": n, "exit": …, "why":
…}` for each; `exit` is null for a line that starts something, else the status that the program would end with.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from types import SimpleNamespace
from typing import Any, Self

from front_end import accepted
from tiny_models import make_tiny_models


class Accepted(BaseException):
    """The line got as far as starting something."""


def accept(*_: Any, **__: Any) -> Any:
    raise Accepted


def before_imports() -> None:
    """Older releases ask torch for something that it no longer has."""
    import torch

    if not hasattr(torch._C._cpu, "_is_avx512_supported"):
        torch._C._cpu._is_avx512_supported = lambda: False
    with contextlib.suppress(ImportError):
        from vllm.model_executor.models import registry

        # A subprocess that asks what a model can do would lack the above.
        if hasattr(registry, "_run_in_subprocess"):
            registry._run_in_subprocess = lambda function: function()


class Ready:
    """Stands for what the launcher makes before it starts ranks: coordinator, store, sockets."""

    port = 1
    proc = SimpleNamespace(pid=0)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_engine_socket_addresses(self) -> tuple[str, str]:
        return "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"

    def get_stats_publish_address(self) -> str:
        return "tcp://127.0.0.1:3"


def launch(config: Any) -> None:
    """vLLM's own launcher, with its checks. Raises Accepted where it would start ranks or wait for them."""
    from vllm.v1.engine import utils

    addresses = utils.EngineZmqAddresses(inputs=["tcp://127.0.0.1:4"], outputs=["tcp://127.0.0.1:5"])
    more = accepted(utils.launch_core_engines, {"addresses": addresses})
    with utils.launch_core_engines(config, None, False, **more):
        raise Accepted


def patch(serve: Any) -> None:
    """Stop every way of `serve` where it would start processes, after its own checks."""
    import vllm
    from vllm.distributed import utils as distributed
    from vllm.v1.engine import utils

    async def one_api_server(args: Any, **_: Any) -> None:
        launch(vllm.AsyncEngineArgs.from_cli_args(args).create_engine_config())

    serve.run_server = one_api_server
    serve.setup_server = lambda *_, **__: ("", None)
    serve.setup_multiprocess_prometheus = lambda: None
    serve.launch_core_engines = lambda config, *_, **__: launch(config)
    serve.CoreEngineProcManager = accept
    utils.CoreEngineProcManager = accept
    utils.DPCoordinator = utils.zmq_socket_ctx = Ready
    distributed.create_tcp_store = Ready
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.entrypoints.launchers import dp_supervisor

        dp_supervisor.DPSupervisor.run = accept


def judge(line: str, model: str) -> tuple[int | None, str]:
    """None when the line would start something, else the program's exit status; and why."""
    from vllm.entrypoints.cli import serve

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser(description="vLLM CLI")
    command = serve.cmd_init()[0]
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        args = parser.parse_args(["serve", model, *shlex.split(line)])
        command.validate(args)
        command.cmd(args)
    except Accepted:
        return None, ""
    except SystemExit as leaving:
        return int(leaving.code or 0), "as argparse refuses"
    except Exception as failure:
        # Nobody catches it: a traceback and status 1.
        return 1, f"{type(failure).__name__}: {failure}"
    return 0, "returned"


def run(settings: dict[str, Any]) -> None:
    # A tiny model's lengths are nobody's business here.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    before_imports()
    from vllm.entrypoints.cli import serve

    models = make_tiny_models(settings["folder"])
    patch(serve)
    for number, (kind, line) in enumerate(settings["lines"]):
        status, why = judge(line, models[kind])
        print(json.dumps({"line": number, "exit": status, "why": why[:300]}), flush=True)
    print(json.dumps({"done": len(settings["lines"])}), flush=True)
