"""A pod of ours whose ranks are somebody else's: `python our_node.py ARGUMENTS…`, where ARGUMENTS follow `serve`.

Where the launcher would start a rank it starts a process that only prints
`{"engine": {"rank": …, "handshake": …, "own": …}}` and waits.
"""

from __future__ import annotations

import json
import signal
import sys

from dp_engine import launcher, processes
from dp_engine.engine_core import EngineConfig
from dp_engine.options import parse_options
from dp_engine.processes import Child


def announce(config: EngineConfig) -> int:
    where = {"rank": config.rank, "handshake": config.handshake_address, "own": config.own_handshake_address}
    print(json.dumps({"engine": where}), flush=True)
    while True:
        signal.pause()


def fork_announcement(config: EngineConfig, close: list[int]) -> Child:
    name = f"rank-{config.rank}-elsewhere"
    return processes.fork(name, lambda: announce(config), title=name, command=name, close=close)


def main() -> int:
    launcher._fork_engine = fork_announcement
    return launcher.serve(parse_options(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
