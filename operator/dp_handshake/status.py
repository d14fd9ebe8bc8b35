"""Print a snapshot for people."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

import msgspec

from dp_handshake.messages import Snapshot
from dp_handshake.ranks import parse_ranks


def table(snapshot: Snapshot) -> str:
    """Render one snapshot as a few lines: stages, what is missing, what went wrong."""
    own = snapshot.local
    since = snapshot.released_at
    clock = f", released {snapshot.time - since:.0f} s ago" if since is not None else ""
    if since is not None and snapshot.ready_at is not None:
        clock = f", ready {snapshot.ready_at - since:.1f} s after the release"
    lines = [f"incarnation {snapshot.incarnation}: pods {snapshot.arrived_pods}/{snapshot.expected_pods}{clock}"]
    for name, text, local in (
        ("arrived", snapshot.stages.arrived, own.expected),
        ("connected", snapshot.stages.connected, own.connected),
        ("loaded", snapshot.stages.loaded, own.loaded),
        ("ready", snapshot.stages.ready, own.ready),
    ):
        note = f"  (head: {local} of {own.expected})" if own.expected > 1 and local < own.expected else ""
        lines.append(f"  {name:<10} {_count(text):>9}/{snapshot.size}  {text}{note}")
    if snapshot.missing_pods:
        more = snapshot.expected_pods - snapshot.arrived_pods - len(snapshot.missing_pods)
        names = ", ".join(snapshot.missing_pods)
        lines.append(f"  not here yet: {names}" + (f" and {more} more" if more else ""))
    lines += [f"  lost: {lost.message} (pod {lost.pod})" for lost in snapshot.lost]
    lines += [f"  restarted: {entry.message}" for entry in snapshot.restarted]
    lines += [f"  {entry.kind} x{entry.count}: {entry.message}" for entry in snapshot.violations]
    return "\n".join(lines)


def show(url: str, *, watch: bool) -> int:
    """Fetch and print; with watch, on every change until interrupted. Gives the exit code."""
    address = url.rstrip("/") + "/v1/handshake" + ("?watch=1" if watch else "")
    if not address.startswith(("http://", "https://")):
        sys.stderr.write(f"{url} is not an http address\n")
        return 2
    try:
        with urllib.request.urlopen(address, timeout=30) as response:  # noqa: S310 - the scheme is checked above
            for line in response:
                print(table(msgspec.json.decode(line, type=Snapshot)), flush=True)
    except (OSError, urllib.error.URLError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"{address}: {error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _count(text: str) -> str:
    try:
        return str(len(parse_ranks(text)))
    except ValueError:
        return "?"
