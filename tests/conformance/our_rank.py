"""One of our ranks in a pod whose front end is somebody else's: `python our_rank.py RANK HANDSHAKE OWN ARGUMENTS…`.

HANDSHAKE is where the group's head shakes hands; OWN, or `-`, where the pod's own front end does. ARGUMENTS are what
the pod's `serve` was given.
"""

from __future__ import annotations

import sys

from dp_engine.engine import run_engine
from dp_engine.engine_core import EngineConfig
from dp_engine.modes import is_moe, resolve
from dp_engine.options import parse_options


def main() -> int:
    rank, handshake, own, *arguments = sys.argv[1:]
    options = parse_options(arguments)
    return run_engine(
        EngineConfig(
            rank=int(rank),
            launch=resolve(options, moe=is_moe(options)),
            options=options,
            handshake_address=handshake,
            own_handshake_address=None if own == "-" else own,
            local=own == "-",
            headless=False,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
