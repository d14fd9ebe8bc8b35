"""What one release of vLLM does with command lines: started, or refused before anything starts.

A case of `release.py`: `{"kind": "command_lines", "lines": [["dense", "-dp 4"], …], "folder": "/tmp/models"}`. vLLM's
own parser, its `serve` command and its configuration run; only what would start processes is replaced. The models are
folders with a configuration and a tokenizer, made here. Prints `{"line": n, "accepted": bool, "why": …}` for each.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

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


def patch(serve: Any) -> None:
    """Stop every way of `serve` where it would start processes, after its own checks."""
    import vllm

    async def one_api_server(args: Any, **_: Any) -> None:
        config = vllm.AsyncEngineArgs.from_cli_args(args).create_engine_config()
        parallel = config.parallel_config
        # The launcher's own first check.
        alone = getattr(parallel, "local_engines_only", None)
        if alone is None:
            alone = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
        if not alone and parallel.data_parallel_rank > 0:
            raise AssertionError("found internal DPLB, which is incompatible.")
        raise Accepted

    serve.run_server = one_api_server
    serve.setup_server = lambda *_, **__: ("", None)
    serve.setup_multiprocess_prometheus = lambda: None
    serve.launch_core_engines = accept
    serve.CoreEngineProcManager = accept
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.entrypoints.launchers import dp_supervisor

        dp_supervisor.DPSupervisor.run = accept


def judge(line: str, model: str) -> str | None:
    """None when the line would start something, else why it does not."""
    from vllm.entrypoints.cli import serve

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser(description="vLLM CLI")
    command = serve.cmd_init()[0]
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        args = parser.parse_args(["serve", model, *line.split()])
        command.validate(args)
        command.cmd(args)
    except Accepted:
        return None
    except SystemExit as leaving:
        return f"exit {leaving.code}"
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "returned"


def run(settings: dict[str, Any]) -> None:
    before_imports()
    from vllm.entrypoints.cli import serve

    models = make_tiny_models(settings["folder"])
    patch(serve)
    for number, (kind, line) in enumerate(settings["lines"]):
        why = judge(line, models[kind])
        print(json.dumps({"line": number, "accepted": why is None, "why": (why or "")[:300]}), flush=True)
    print(json.dumps({"done": len(settings["lines"])}), flush=True)
