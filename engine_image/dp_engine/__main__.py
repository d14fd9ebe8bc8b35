"""`dp-engine serve MODEL [flags]` takes `vllm serve`'s command line; `dp-engine versions` says what it imitates."""

from __future__ import annotations

import importlib
import sys

from dp_engine import launcher, logs, versions
from dp_engine.faults import FAULT_ENV
from dp_engine.options import parse_options

_USAGE = f"""usage: dp-engine serve MODEL [vllm serve's flags]   start a stand-in for `vllm serve MODEL ...`
       dp-engine serve --help                       all flags; the engine's own are listed last
       dp-engine offline MODEL --prompts FILE -dp N answer a file of prompts without a server
       dp-engine versions                           what differs between vLLM releases, as far as imitated
       dp-engine --version                          the vLLM release that is imitated

{FAULT_ENV} holds faults as --fault takes them, separated by spaces."""


def main() -> int:
    """Entry point. Exit codes: 0 as vLLM, 1 for a failed start or a refused combination, 2 for bad syntax."""
    arguments = sys.argv[1:]
    match arguments:
        case ["serve", *rest]:
            try:
                return launcher.serve(parse_options(rest))
            except (ValueError, OSError) as failure:
                logs.error(f"{type(failure).__name__}: {failure}")
                return 1
        case ["offline", *rest]:
            # Its client is an asyncio program: a server's launcher and ranks do without.
            return int(importlib.import_module("dp_engine.offline").main(rest))
        case ["versions"]:
            print(versions.table())
            return 0
        case ["--version" | "-v"]:
            print(versions.emulated_version(None))
            return 0
        case ["--help" | "-h"]:
            print(_USAGE)
            return 0
        case _:
            print(_USAGE, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
