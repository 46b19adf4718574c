"""gdb remote serial protocol: packets and what their payloads say, bytes to facts and back.

Written down in the GDB manual, appendix "GDB Remote Serial Protocol": ``$payload#cs``, where
``cs`` is the sum of the payload's bytes, ``}X`` is the byte ``X ^ 0x20``, and ``a*N`` is ``a``
and then ``N - 29`` more of it.
"""

import binascii
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from kprobes.errors import FormatError
from kprobes.units import KIB, MIB

MAX_PACKET = MIB
"""Bytes of a packet that we accept, as sent and as decoded; QEMU's are 4 KiB."""
DEFAULT_PACKET_SIZE = KIB
"""What a stub that does not say takes for certain."""

INTERRUPT = b"\x03"
OK = b"$OK#9a"
"""The packet that answers nearly every write, as it comes."""
_LONG = 512
_ACKS = b"+-"
_START, _END, _ESCAPE, _REPEAT = b"$", b"#", b"}", b"*"
_SPECIAL = re.compile(rb"[#$}*]")
_REPEAT_BIAS = 29
_STOP = re.compile(rb"[TS]([0-9a-fA-F]{2})")
_THREAD = re.compile(rb"thread:([^;]*)")
_WATCHED = re.compile(rb"[ra]?watch:[^;]*")
_THREAD_ID = re.compile(rb"(?:p-?[0-9a-fA-F]+\.)?([0-9a-fA-F]{1,8})")
_ERROR = re.compile(rb"E(?:[0-9a-fA-F]{2}|\..*)", re.DOTALL)
_EXIT = re.compile(rb"[WX][0-9a-fA-F]{2}")


class Packet(NamedTuple):
    """One packet found in a byte stream.

    Attributes:
        payload: decoded; meaningless unless ``is_intact``.
        is_intact: whether the checksum is right.
        end: where the stream goes on.
    """

    payload: bytes
    is_intact: bool
    end: int


class StopReply(Struct, frozen=True, kw_only=True):
    """Why a guest stopped.

    Attributes:
        signal: 2 after an interrupt, 5 for a breakpoint or a step.
        cpu: the thread id of the vCPU that stopped, or None when the stub does not say.
        watched: where memory was touched that is watched, as the stub says it; else empty.
    """

    signal: int
    cpu: int | None
    watched: bytes = b""


def frame(payload: bytes) -> bytes:
    """Return the packet that carries a payload."""
    escaped = _SPECIAL.sub(lambda found: bytes((0x7D, found[0][0] ^ 0x20)), payload)
    return b"$%b#%02x" % (escaped, _sum(escaped))


def next_packet(stream: bytes | bytearray) -> Packet | None:
    """Return the first packet of a stream, or None when it is not complete yet.

    Raises:
        FormatError: something between packets that is not an acknowledgement, or a packet
            without end.
    """
    start = 0
    while start < len(stream) and stream[start] in _ACKS:
        start += 1
    end = stream.find(_END, start)
    if stream[start : start + 1] not in (_START, b""):
        raise FormatError(f"no gdb packet: {bytes(stream[start : start + 32])!r}")
    if end < 0 or len(stream) < end + 3:
        if len(stream) > MAX_PACKET:
            raise FormatError(f"a gdb packet of more than {MAX_PACKET} bytes")
        return None
    raw = bytes(stream[start + 1 : end])
    is_intact = bytes(stream[end + 1 : end + 3]).lower() == b"%02x" % _sum(raw)
    return Packet(_decoded(raw) if is_intact else b"", is_intact, end + 3)


def next_request(stream: bytes | bytearray) -> Packet | None:
    """Return a client's first packet, or its ``INTERRUPT``; None when it is not complete yet.

    Raises:
        FormatError: as of ``next_packet``.
    """
    start = 0
    while start < len(stream) and stream[start] in _ACKS:
        start += 1
    if stream[start : start + 1] == INTERRUPT:
        return Packet(INTERRUPT, True, start + 1)
    return next_packet(stream)


def _sum(data: bytes) -> int:
    # Python's own sum takes 25 us for 4 KiB, and a guest may stand still meanwhile.
    if len(data) < _LONG:
        return sum(data) & 0xFF
    return int(np.frombuffer(data, np.uint8).sum()) & 0xFF


def _decoded(raw: bytes) -> bytes:
    if _ESCAPE not in raw and _REPEAT not in raw:
        return raw
    # A repeat can follow an escaped byte (`}X*N`), so escapes cannot all go first.
    out = bytearray()
    at = 0
    while at < len(raw):
        at = _decode_one(raw, at, out)
        if len(out) > MAX_PACKET:
            raise FormatError(f"a gdb packet that decodes to more than {MAX_PACKET} bytes")
    return bytes(out)


def _decode_one(raw: bytes, at: int, out: bytearray) -> int:
    byte = raw[at : at + 1]
    if byte not in (_ESCAPE, _REPEAT):
        out += byte
        return at + 1
    if at + 1 == len(raw):
        raise FormatError("a gdb packet ends in the middle of an escape")
    if byte == _ESCAPE:
        out.append(raw[at + 1] ^ 0x20)
    else:
        count = raw[at + 1] - _REPEAT_BIAS
        if not out or count < 1:
            raise FormatError("a gdb packet with a run of nothing")
        out += out[-1:] * count
    return at + 2


def is_error(payload: bytes) -> bool:
    """Whether an answer is ``Exx`` or ``E.text``."""
    return _ERROR.fullmatch(payload) is not None


def is_stop(payload: bytes) -> bool:
    """Whether a packet says that the guest stopped."""
    return _STOP.match(payload) is not None


def is_exit(payload: bytes) -> bool:
    """Whether a packet says that the guest ended."""
    return _EXIT.match(payload) is not None


def is_output(payload: bytes) -> bool:
    """Whether a packet is text for the console, on the way to an answer."""
    return payload[:1] == b"O" and payload != b"OK"


def parse_stop(payload: bytes) -> StopReply:
    """Read a ``T`` or ``S`` packet."""
    found = _STOP.match(payload)
    if found is None:
        raise FormatError(f"no stop reply: {payload[:64]!r}")
    thread = _THREAD.search(payload)
    cpu = parse_thread_id(thread[1]) if thread else None
    watched = _WATCHED.search(payload)
    return StopReply(signal=int(found[1], 16), cpu=cpu, watched=watched[0] if watched else b"")


def parse_thread_id(text: bytes) -> int:
    """Read ``TID`` or ``pPID.TID``.

    QEMU goes on writing the second form when an earlier client asked for it.
    """
    found = _THREAD_ID.fullmatch(text)
    if found is None:
        raise FormatError(f"no thread id: {text[:64]!r}")
    return int(found[1], 16)


def parse_thread_list(payload: bytes) -> tuple[int, ...]:
    """Read one answer to ``qfThreadInfo`` or ``qsThreadInfo``; empty at the list's end."""
    match payload[:1]:
        case b"m":
            return tuple(parse_thread_id(word) for word in payload[1:].split(b","))
        case b"l":
            return ()
        case _:
            raise FormatError(f"no list of threads: {payload[:64]!r}")


def parse_supported(payload: bytes) -> dict[str, str]:
    """Read the answer to ``qSupported``: ``name=value``, ``name+``, ``name-``."""
    features: dict[str, str] = {}
    for word in payload.decode("ascii", "replace").split(";"):
        name, equals, value = word.partition("=")
        if equals:
            features[name] = value
        elif word:
            features[word[:-1]] = word[-1]
    return features


def packet_size(features: dict[str, str]) -> int:
    """Return how many bytes of payload a stub takes."""
    text = features.get("PacketSize", f"{DEFAULT_PACKET_SIZE:x}")
    if re.fullmatch("[0-9a-fA-F]{1,8}", text) is None or int(text, 16) < 64:
        raise FormatError(f"a gdb stub with packets of {text!r} bytes")
    return min(int(text, 16), MAX_PACKET)


def to_hex(data: bytes) -> bytes:
    """Return two lower-case digits for each byte."""
    return binascii.hexlify(data)


def from_hex(payload: bytes) -> bytes:
    """Return the bytes that pairs of digits stand for."""
    try:
        return binascii.unhexlify(payload)
    except binascii.Error as e:
        raise FormatError(f"no pairs of hex digits: {payload[:64]!r}") from e


def console_text(packets: Iterable[bytes]) -> str:
    """Return what ``O`` packets print."""
    return b"".join(from_hex(packet[1:]) for packet in packets).decode("utf-8", "replace")
