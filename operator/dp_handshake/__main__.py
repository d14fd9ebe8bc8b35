"""`dp-handshake`: the head pod's sidecar, and a look at it for people."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; gives the exit code."""
    parser = argparse.ArgumentParser(prog="dp-handshake", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    relay = commands.add_parser("relay", help="run the relay and the monitor of one incarnation (head pod's sidecar)")
    relay.add_argument("--plan", type=Path, default=Path("/dataparallel/plan.json"), help="launch plan [%(default)s]")
    relay.add_argument(
        "--state-dir", type=Path, default=Path("/run/dataparallel"), help="survives a restart [%(default)s]"
    )
    relay.add_argument("--pod-ip", default=os.environ.get("POD_IP", ""), help="address of this pod [$POD_IP]")
    relay.add_argument(
        "--heartbeat-interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="a rank that stays silent three times as long has lost its connection [%(default)s]",
    )
    relay.add_argument("--log-level", default="INFO", help="[%(default)s]")
    for name, text in (("status", "print the state of a group's start"), ("watch", "the same, on every change")):
        command = commands.add_parser(name, help=text)
        command.add_argument("url", help="the monitor, such as http://10.0.0.7:13350")
    options = parser.parse_args(argv)
    if options.command == "relay":
        return _relay(parser, options)
    from dp_handshake.status import show  # noqa: PLC0415 - the sidecar does not need it

    return show(options.url, watch=options.command == "watch")


def _relay(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from dp_handshake.addresses import canonical  # noqa: PLC0415 - see work
    from dp_handshake.supervise import supervise  # noqa: PLC0415

    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    if canonical(options.pod_ip) is None:
        parser.error(f"--pod-ip (or POD_IP) must be an IP address, not {options.pod_ip!r}")

    def work() -> None:
        # Imported in the worker only: the supervisor stays small.
        import msgspec  # noqa: PLC0415

        from dp_handshake.messages import LaunchPlan  # noqa: PLC0415
        from dp_handshake.relay import Heartbeat  # noqa: PLC0415
        from dp_handshake.service import Settings, run  # noqa: PLC0415

        plan = msgspec.json.decode(options.plan.read_bytes(), type=LaunchPlan)
        settings = Settings(
            plan=plan,
            state_dir=options.state_dir,
            pod_ip=options.pod_ip,
            heartbeat=Heartbeat(interval_s=options.heartbeat_interval),
        )
        asyncio.run(run(settings))

    return supervise(work)


if __name__ == "__main__":
    sys.exit(main())
