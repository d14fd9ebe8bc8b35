"""Our coordinator alone: `python our_coordinator.py SIZE VERSION [--moe]` prints its endpoints and serves."""

from __future__ import annotations

import os
import sys
import threading

from dp_engine.coordinator_process import run_coordinator
from dp_engine.modes import resolve
from dp_engine.options import parse_options
from dp_engine.versions import wire_of


def main() -> None:
    size, version, *more = sys.argv[1:]
    kind = "--moe" if more else "--no-moe"
    group = ["-dp", size, "-dpl", "0", "-dpa", "127.0.0.1", "-asc", "1"]
    launch = resolve(parse_options(["m", *group, kind, "--emulate-version", version]), moe=bool(more))
    reader, writer = os.pipe()

    def report() -> None:
        print(f'{{"endpoints": {os.read(reader, 65536).decode()}}}', flush=True)

    threading.Thread(target=report, daemon=True).start()
    sys.exit(run_coordinator(launch, wire_of(version), writer))


if __name__ == "__main__":
    main()
