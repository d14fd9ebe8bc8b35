"""`dp-engine serve MODEL [flags]` takes `vllm serve`'s command line; `dp-engine --version` says what it imitates."""

from __future__ import annotations

import sys

from dp_engine import launcher, logs
from dp_engine.faults import FAULT_ENV
from dp_engine.options import parse_options
from dp_engine.versions import emulated_version

_USAGE = f"""usage: dp-engine serve MODEL [vllm serve's flags]   start a stand-in for `vllm serve MODEL ...`
       dp-engine serve --help                       all flags; the engine's own are listed last
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
        case ["--version" | "-v"]:
            print(emulated_version(None))
            return 0
        case ["--help" | "-h"]:
            print(_USAGE)
            return 0
        case _:
            print(_USAGE, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
