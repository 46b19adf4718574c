"""The archive against a reader of our own."""

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.formats import cpio
from tests.build.newc import read


def test_every_kind_of_entry_comes_back() -> None:
    entries = [
        cpio.directory("dev"),
        cpio.character_device("dev/console", 5, 1),
        cpio.file("init", b"#!/bin/sh\n", mode=0o755),
        cpio.link("linuxrc", "/bin/busybox"),
    ]

    found = read(cpio.archive(entries))

    assert list(found) == ["dev", "dev/console", "init", "linuxrc"]
    assert [stat.filemode(entry.mode) for entry in found.values()] == [
        "drwxr-xr-x",
        "crw-------",
        "-rwxr-xr-x",
        "lrwxrwxrwx",
    ]
    assert found["dev/console"].device == (5, 1)
    assert found["init"].data == b"#!/bin/sh\n"
    assert found["linuxrc"].data == b"/bin/busybox"
    assert {entry.owner for entry in found.values()} == {(0, 0)}
    assert {entry.mtime for entry in found.values()} == {0}


def test_two_files_never_share_an_inode() -> None:
    found = read(cpio.archive([cpio.file("a", b"1"), cpio.file("b", b"2")]))

    # Equal numbers with more than one link would make b a hard link of a.
    assert found["a"].ino != found["b"].ino
    assert (found["a"].links, found["b"].links) == (1, 1)


@given(st.lists(st.tuples(st.text("ab/é.", min_size=1, max_size=9), st.binary(max_size=9))))
def test_names_and_data_of_every_length_come_back(pairs: list[tuple[str, bytes]]) -> None:
    wanted = {name: data for name, data in pairs if not name.startswith("/")}

    found = read(cpio.archive(cpio.file(name, data) for name, data in wanted.items()))

    assert {name: entry.data for name, entry in found.items()} == wanted


def test_archives_may_follow_each_other() -> None:
    first = cpio.archive([cpio.file("a", b"old"), cpio.file("b", b"x")])

    found = read(first + cpio.archive([cpio.file("a", b"new")]))

    assert (found["a"].data, found["b"].data) == (b"new", b"x")


def test_the_same_entries_give_the_same_bytes() -> None:
    entries = [cpio.directory("a"), cpio.file("a/b", b"data")]

    assert cpio.archive(entries) == cpio.archive(iter(entries))


@pytest.mark.parametrize("path", ["", "/init", "a\0b", "x" * 4096])
def test_a_path_that_the_kernel_would_not_unpack_is_our_bug(path: str) -> None:
    with pytest.raises(ValueError, match="no path"):
        cpio.file(path, b"")
