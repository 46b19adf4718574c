"""Frames: what is packed is unpacked, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import FormatError
from kprobes.formats.recording import (
    FRAME_SIZE,
    MARKER,
    MAX_SIZE,
    FrameKind,
    check_file_header,
    file_header,
    pack_frame,
    parse_frame_header,
    unpack_frame,
)


def unpack(frame: bytes) -> bytes:
    return unpack_frame(parse_frame_header(frame[:FRAME_SIZE]), frame[FRAME_SIZE:])


@given(st.binary(max_size=300), st.sampled_from([None, 1, 3]))
def test_a_frame_has_what_was_packed(data: bytes, level: int | None) -> None:
    frame = pack_frame(FrameKind.CHUNK, data, level=level)

    assert unpack(frame) == data
    assert parse_frame_header(frame[:FRAME_SIZE]).kind == FrameKind.CHUNK


def test_what_repeats_is_stored_in_less() -> None:
    frame = pack_frame(FrameKind.CHUNK, bytes(10_000), level=3)

    assert len(frame) < 100
    assert unpack(frame) == bytes(10_000)


@pytest.mark.parametrize("level", [None, 3])
def test_no_bit_of_a_frame_may_be_another(level: int | None) -> None:
    frame = pack_frame(FrameKind.CHUNK, b"ab" * 20, level=level)
    for bit in range(8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8

        with pytest.raises(FormatError):
            unpack(bytes(bad))


def test_a_frame_has_an_end() -> None:
    with pytest.raises(ValueError, match="bytes"):
        pack_frame(FrameKind.CHUNK, bytes(MAX_SIZE + 1))

    too_long = MARKER + bytes(4) + (MAX_SIZE + 1).to_bytes(4, "little") * 2 + bytes(4)
    with pytest.raises(FormatError):
        parse_frame_header(too_long)


def test_a_file_header_is_of_this_version_only() -> None:
    check_file_header(file_header())
    for bad in (file_header()[:12], file_header().replace(b"\1", b"\2"), b"kprobes"):
        with pytest.raises(FormatError):
            check_file_header(bad)
