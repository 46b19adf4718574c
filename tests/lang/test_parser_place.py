import pytest

from kprobes.model.definition import Kind, Span
from tests.build.definitions import Wrong, caret_of, read


@pytest.mark.parametrize(
    ("text", "symbol", "offset"),
    [
        ("vfs_read", "vfs_read", 0),
        ("vfs_read+8", "vfs_read", 8),
        ("vfs_read+0x10", "vfs_read", 16),
        ("vfs_read+010", "vfs_read", 8),
        ("vfs_read+4294967295", "vfs_read", 0xFFFFFFFF),
        ("foo.isra.0", "foo.isra.0", 0),
    ],
)
def test_a_symbol_and_its_offset_are_read(text: str, symbol: str, offset: int) -> None:
    place = read(f"p {text}").place

    assert (place.symbol, place.offset) == (symbol, offset)
    assert (place.span.start, place.span.stop) == (2, 2 + len(text))
    assert not place.is_glob


@pytest.mark.parametrize("text", ["vfs_*", "*_read", "vfs_[rw]*", "vfs_[a-z]*", "vfs_rea?"])
def test_a_place_may_be_a_pattern(text: str) -> None:
    found = read(f"p {text}")

    assert found.place.symbol == text
    assert found.place.is_glob
    assert (found.event, found.is_named) == ("", False)


def test_a_pattern_may_have_an_offset() -> None:
    place = read("p vfs_[a-z]*+4").place

    assert (place.symbol, place.offset) == ("vfs_[a-z]*", 4)


def test_a_place_may_be_in_a_module() -> None:
    found = read("p ext4:ext4_sync_fs+4")

    assert (found.place.module, found.place.symbol) == ("ext4", "ext4_sync_fs")
    assert (found.place.offset, found.event) == (4, "p_ext4_ext4_sync_fs_4")


def test_a_pattern_may_be_in_a_module() -> None:
    place = read("p ext4:ext4_*").place

    assert (place.module, place.symbol, place.is_glob) == ("ext4", "ext4_*", True)


@pytest.mark.parametrize(
    ("text", "addr"), [("0xffffffff81000000", 0xFFFFFFFF81000000), ("+4", 4), ("010", 8)]
)
def test_a_place_may_be_an_address(text: str, addr: int) -> None:
    found = read(f"p {text}")

    assert (found.place.symbol, found.place.addr) == ("", addr)
    assert found.event == f"p_{addr:#018x}"


def test_return_after_the_symbol_probes_its_return() -> None:
    found = read("p vfs_read+0%return $retval")

    assert (found.kind, found.place.symbol) == (Kind.RETURN, "vfs_read")
    assert (found.event, found.place.span) == ("r_vfs_read_0", Span(2, 12))


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p ^vfs_read-8", "BAD_PROBE_ADDR"),
        ("p ^vfs_read+8-1", "BAD_PROBE_ADDR"),
        ("p ^vfs_read+", "BAD_PROBE_ADDR"),
        ("p ^vfs_read++4", "BAD_PROBE_ADDR"),
        ("p ^vfs_read+-0", "BAD_PROBE_ADDR"),
        ("p ^vfs_read+zz", "BAD_PROBE_ADDR"),
        ("p ^vfs_read+4294967296", "BAD_PROBE_ADDR"),
        ("p:longer ^vfs_read+zz", "BAD_PROBE_ADDR"),
        ("p ^-4", "BAD_PROBE_ADDR"),
        ("p ^%return", "BAD_PROBE_ADDR"),
        ("p ^9lives", "BAD_PROBE_ADDR"),
        ("p ^08", "BAD_PROBE_ADDR"),
        ("p ^/bin/sh", "BAD_PROBE_ADDR"),
        ("p ^vfs_réad", "BAD_PROBE_ADDR"),
        ("p vfs_read^%foo", "BAD_ADDR_SUFFIX"),
        ("p vfs_read^%", "BAD_ADDR_SUFFIX"),
        ("p vfs_read^%return+4", "BAD_ADDR_SUFFIX"),
        ("p vfs_read^%%return", "BAD_ADDR_SUFFIX"),
        ("p 9lives^%foo", "BAD_ADDR_SUFFIX"),
        ("p ^:vfs_read", "BAD_PROBE_ADDR"),
        ("p ^ext4:", "BAD_PROBE_ADDR"),
        ("p ^a!b:foo", "BAD_PROBE_ADDR"),
        ("p ^a:b:c", "BAD_PROBE_ADDR"),
    ],
)
def test_the_caret_marks_the_wrong_place(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)
