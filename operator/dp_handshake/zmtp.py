"""The client side of ZMTP 3.1 with the NULL mechanism, as a DEALER needs it. Pure: bytes in, frames out.

The relay holds one upstream connection per rank. As libzmq sockets these cost two more descriptors each, count against
the limit of sockets per context, take most of the relay's time, and reconnect without end once the head closes its
port. The wire itself is small (https://rfc.zeromq.org/spec/37/): a 64-byte greeting, a READY command each way, then
frames of flags, length, body.
"""

from __future__ import annotations

from msgspec import Struct, field

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
MAX_FRAME_BYTES = 1 << 20
_MORE, _LONG, _COMMAND = 1, 2, 4


class ProtocolError(ValueError):
    """The other side does not speak ZMTP 3 as a ROUTER of libzmq does."""


class Incoming(Struct, kw_only=True):
    """What has been received on one connection and not yet understood."""

    buffer: bytearray = field(default_factory=bytearray)
    greeted: bool = False
    ready: bool = False
    parts: list[bytes] = field(default_factory=list)


def opening(identity: bytes) -> bytes:
    """Greeting and READY command of a DEALER with this identity. No message may follow before `ready`."""
    properties = _property(b"Socket-Type", b"DEALER") + _property(b"Identity", identity)
    body = b"\x05READY" + properties
    return GREETING + bytes((_COMMAND, len(body))) + body


def message(frame: bytes) -> bytes:
    """One message of one frame."""
    if len(frame) < 256:
        return bytes((0, len(frame))) + frame
    return bytes((_LONG,)) + len(frame).to_bytes(8, "big") + frame


def receive(state: Incoming, data: bytes) -> tuple[list[list[bytes]], bytes]:
    """Take received bytes; give complete messages and the bytes to send back (answers to PING).

    Raises ProtocolError; the connection is then of no more use.
    """
    state.buffer += data
    messages: list[list[bytes]] = []
    reply = b""
    if not state.greeted:
        if len(state.buffer) < len(GREETING):
            return [], b""
        if state.buffer[0] != 0xFF or state.buffer[10] < 3 or state.buffer[12:16] != b"NULL":
            raise ProtocolError(f"greeting {bytes(state.buffer[:16]).hex()} is not ZMTP 3 with NULL")
        del state.buffer[: len(GREETING)]
        state.greeted = True
    while (frame := _take(state.buffer)) is not None:
        flags, body = frame
        if flags & _COMMAND:
            if body.startswith(b"\x05READY"):
                state.ready = True
            elif body.startswith(b"\x05ERROR"):
                raise ProtocolError(f"refused: {body[7:].decode(errors='replace')}")
            elif body.startswith(b"\x04PING"):
                # PONG carries the context of the PING, without its two bytes of time to live.
                pong = b"\x04PONG" + body[7:23]
                reply += bytes((_COMMAND, len(pong))) + pong
            continue
        state.parts.append(body)
        if not flags & _MORE:
            messages.append(state.parts)
            state.parts = []
    return messages, reply


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _take(buffer: bytearray) -> tuple[int, bytes] | None:
    if len(buffer) < 2:
        return None
    flags = buffer[0]
    if flags & _LONG:
        if len(buffer) < 9:
            return None
        head, length = 9, int.from_bytes(buffer[1:9], "big")
    else:
        head, length = 2, buffer[1]
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {length} bytes")
    if len(buffer) < head + length:
        return None
    body = bytes(buffer[head : head + length])
    del buffer[: head + length]
    return flags, body
