"""One release of vLLM, imported once: every line on standard input is a case, run in a fork.

    echo '{"kind": "front_end", "log": "case.log", …}' | python release.py

Runs in the cached environment, with the release's files on PYTHONPATH. Answers each line with the process id of its
case, which leads a process group of its own and writes to its log.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback

import command_lines
import engines
import front_end
import handshake_cost
import node
import vllm
from vllm.sampling_params import SamplingParams  # noqa: F401 - imported before the forks
from vllm.v1.engine import coordinator, core, core_client, utils  # noqa: F401 - imported before the forks

logging.disable(logging.WARNING)
CASES = {
    "front_end": front_end.run,
    "node": node.run,
    "engines": engines.run,
    "command_lines": command_lines.run,
    "handshake_cost": handshake_cost.run,
}


def run_case(settings: dict[str, object]) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    log = os.open(str(settings["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        CASES[str(settings["kind"])](settings)
    except BaseException as failure:
        print(json.dumps({"error": repr(failure), "trace": traceback.format_exc()[-3000:]}), flush=True)
    finally:
        # vLLM's client leaves threads behind that would keep the interpreter.
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        settings = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_case(settings)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    main()
