"""Command line of the test cluster; README.md in this folder explains it."""

import argparse
import sys
from collections.abc import Callable

from . import images
from .bed import Bed, describe
from .console import say, step
from .errors import BedError
from .kind import KindCluster, choose

Command = Callable[[Bed | KindCluster, argparse.Namespace], None]


def _up(bed: Bed | KindCluster, _: argparse.Namespace) -> None:
    bed.up()
    say(describe())


def _down(bed: Bed | KindCluster, given: argparse.Namespace) -> None:
    with step("stopping the cluster"):
        bed.down(any_checkout=given.any)


def _status(bed: Bed | KindCluster, _: argparse.Namespace) -> None:
    for name, word in bed.status().items():
        say(f"{name:20} {word}")


_COMMANDS: dict[str, tuple[str, Command]] = {
    "up": ("start the cluster, or what is missing of it", _up),
    "down": ("stop it and remove all it made on this machine", _down),
    "images": ("build our images and load them on every node", lambda bed, _: images.ensure(bed)),
    "status": ("show what runs", _status),
    "partition": ("cut a node off the network", lambda bed, given: bed.partition(given.node)),
    "heal": ("end a partition", lambda bed, given: bed.heal(given.node)),
    "stop-node": ("cut a node's power", lambda bed, given: bed.stop_node(given.node)),
    "start-node": ("start a stopped node", lambda bed, given: bed.start_node(given.node)),
    "stop": ("stop one process, for example apiserver", lambda bed, given: bed.stop(given.process)),
    "start": ("start it again", lambda bed, given: bed.start(given.process)),
    "tag-image": (
        "give an image another reference",
        lambda bed, given: bed.tag_image(given.source, given.target, node_name=given.node),
    ),
    "remove-image": (
        "forget an image reference",
        lambda bed, given: bed.remove_image(given.reference, node_name=given.node),
    ),
    "logs": ("print what a process has written", lambda bed, given: say(bed.log(given.process))),
}
_ARGUMENTS = {
    "partition": ("node",),
    "heal": ("node",),
    "stop-node": ("node",),
    "start-node": ("node",),
    "stop": ("process",),
    "start": ("process",),
    "tag-image": ("source", "target"),
    "remove-image": ("reference",),
    "logs": ("process",),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, _) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        for argument in _ARGUMENTS.get(name, ()):
            command.add_argument(argument)
        if name in ("tag-image", "remove-image"):
            command.add_argument("--node", help="on this node only")
        if name == "down":
            command.add_argument("--any", action="store_true", help="also the running bed of another checkout")
    return parser


def main() -> int:
    """Run one command; 1 for anything that a person has to see to."""
    given = _parser().parse_args()
    try:
        _COMMANDS[given.command][1](choose(), given)
    except BedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The same command again goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
