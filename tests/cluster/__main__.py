"""Command line of the test cluster; see README.md in this folder."""

import argparse
import sys

from .bed import Bed, describe
from .console import say, step
from .errors import BedError


def main() -> int:
    b = Bed()
    cmd = sys.argv[1]
    try:
        if cmd == "up":
            b.up()
            say(describe())
        elif cmd == "down":
            b.down(any_checkout="--any" in sys.argv)
        else:
            print(b.status())
    except BedError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
