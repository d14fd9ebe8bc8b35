"""Scripted interaction with the relay's state machine, one readable file each (transcripts/*.txt).

A file holds a `group` line, then commands `> SECONDS COMMAND …`, each followed by what the machine does, and by where
its ranks stand when that has changed. After a change that is meant: `make golden` (UPDATE_GOLDEN=1), and read the
diff.

    hello RANK | ready RANK   from the pod of the rank; from=IP, fd=N|none, id=HEX, local=BOOL, headless=BOOL, and any
                              other KEY=TEXT goes into the message
    raw FRAMES                frames as hex, separated by commas; id= and from= or rank= say from whom
    init RANK                 the head answers;  `init RANK undeliverable`: and the rank is not connected
    delivered RANK            READY is out
    gone fd=N                 a connection ends, by the peer; within=SECONDS: by us, and the rank has so long to come back
    tick [IP=N …]             time passes; connections by address
    restart                   a new relay process takes over what the old one wrote down
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from dp_handshake import protocol
from dp_handshake.messages import LaunchPlan, WorkerSet
from dp_handshake.places import places
from dp_handshake.protocol import Handshake, Stage

TRANSCRIPTS = Path(__file__).parent / "transcripts"
INIT = msgspec.msgpack.encode({"addresses": {"inputs": ["tcp://h:1"], "outputs": ["tcp://h:2"]}, "parallel_config": {}})


class Player:
    def __init__(self, group_line: str) -> None:
        words = dict(word.split("=", 1) for word in group_line.split()[1:])
        size, local = int(words["size"]), int(words.get("local", "1"))
        placement = words.get("head", "Colocated")
        head_pods = 1 if placement == "Colocated" else 0
        self.plan = LaunchPlan(
            name="g",
            group=0,
            incarnation="abc12",
            size=size,
            size_local=local,
            load_balancing=words.get("mode", "Internal"),
            head_placement=placement,
            architecture="Dense",
            head_pod="g-head",
            workers=[
                WorkerSet(
                    name="g-w", replicas=size // local - head_pods, first_rank=local * head_pods, rank_stride=local
                )
            ],
            monitor_host="10.96.0.1",
            rpc_port=13345,
            api_port=8000,
            head_argv=[],
            worker_argv=[],
        )
        self.peers = [
            protocol.Peer(pod=place.pod, address=f"10.0.0.{number}", first_rank=place.first_rank, ranks=place.ranks)
            for number, place in enumerate(places(self.plan), start=1)
        ]
        self.state = self._new()
        if words.get("released", "yes") == "yes":
            protocol.step(self.state, protocol.Released(self.peers), now=0)
        self.shown = ""

    def _new(self) -> Handshake:
        return protocol.handshake(self.plan)

    def play(self, line: str) -> str:
        _, time, command, *arguments = line.split()
        now = float(time)
        options = dict(word.split("=", 1) for word in arguments if "=" in word)
        plain = [word for word in arguments if "=" not in word]
        effects = self._effects(command, plain, options, now)
        lines = [render(effect) for effect in effects] or ["nothing"]
        summary = protocol.summary(self.state)
        if summary != self.shown:
            lines.append(f"ranks: {summary}")
            self.shown = summary
        return "\n".join(lines)

    def _effects(self, command: str, plain: list[str], options: dict[str, str], now: float) -> list[protocol.Effect]:
        if command in ("hello", "ready", "raw"):
            return protocol.step(self.state, self._frames(command, plain, options), now=now)
        if command == "init":
            rank = int(plain[0])
            effects = protocol.step(self.state, protocol.HeadFrames(rank, [INIT]), now=now)
            if "undeliverable" in plain:
                protocol.step(self.state, protocol.Undeliverable(rank, [INIT]), now=now)
            return effects
        if command == "delivered":
            return protocol.step(self.state, protocol.Delivered(int(plain[0])), now=now)
        if command == "gone":
            patience_s = float(options.get("within", protocol.LOST_AFTER_S))
            gone = protocol.PeerGone(int(options["fd"]), back_within_s=patience_s)
            return protocol.step(self.state, gone, now=now)
        if command == "tick":
            return protocol.step(self.state, protocol.Tick({ip: int(n) for ip, n in options.items()}), now=now)
        assert command == "restart", command
        old, self.state = self.state, self._new()
        protocol.step(self.state, protocol.Released(self.peers), now=now)
        return protocol.resume(self.state, bytes(old.stages), old.init, now=now)

    def _frames(self, command: str, plain: list[str], options: dict[str, str]) -> protocol.PeerFrames:
        rank = int(options.pop("rank", plain[0] if command != "raw" else "1"))
        owner = next(
            (peer for peer in self.peers if rank in range(peer.first_rank, peer.first_rank + peer.ranks)), None
        )
        address = options.pop("from", owner.address if owner else "10.0.0.99")
        descriptor = options.pop("fd", str(100 + rank))
        identity = bytes.fromhex(options.pop("id", rank.to_bytes(2, "little").hex()))
        if command == "raw":
            frames = [bytes.fromhex(part) for part in plain[0].split(",")]
        else:
            message: dict[str, object] = {
                "status": command.upper(),
                "local": options.pop("local", "false") == "true",
                "headless": options.pop("headless", str(self.state.headless).lower()) == "true",
            }
            frames = [msgspec.msgpack.encode({**message, **options})]
        return protocol.PeerFrames(
            identity=identity,
            frames=frames,
            address=address,
            connection=None if descriptor == "none" else int(descriptor),
        )


def render(effect: protocol.Effect) -> str:
    if isinstance(effect, protocol.Forward):
        return f"forward {effect.status} of rank {effect.rank}"
    if isinstance(effect, protocol.Answer):
        same = "INIT" if effect.frames == [INIT] else "other frames"
        return f"answer rank {effect.rank}: {same}"
    if isinstance(effect, protocol.Violated):
        entry = effect.violation
        rank = "-" if entry.rank is None else entry.rank
        since = f" since={entry.time:g}" if entry.count > 1 else ""
        return f"refuse {entry.kind} rank={rank} pod={entry.pod or '-'} count={entry.count}{since}\n    {entry.message}"
    if isinstance(effect, protocol.Lost):
        return f"lost rank {effect.lost.rank} pod={effect.lost.pod}\n    {effect.lost.message}"
    return f"found rank {effect.rank}"


def replay(text: str) -> str:
    player: Player | None = None
    output: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            output.append(line)
        elif line.startswith("group"):
            player = Player(line)
            output += [line, ""]
        elif line.startswith(">"):
            assert player is not None
            output += [line, player.play(line), ""]
    return "\n".join(output)


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_the_relay_does_what_the_transcript_says(path: Path) -> None:
    text = path.read_text()
    played = replay(text)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(played)
    else:
        assert played == text


def test_every_stage_and_every_kind_of_refusal_has_a_transcript() -> None:
    text = "\n".join(path.read_text() for path in TRANSCRIPTS.glob("*.txt"))
    source = Path(protocol.__file__).read_text()
    kinds = {word.split('"')[1] for word in source.split("refuse(")[1:] if '"' in word.split(",")[0]}
    assert len(kinds) >= 9, kinds
    assert [kind for kind in sorted(kinds) if f"refuse {kind}" not in text] == []
    assert [stage.name for stage in Stage if f"{stage.name.lower()}=" not in text] == []
