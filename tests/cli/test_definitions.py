"""Definitions from words, files and standard input."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from kprobes.cli.definitions import add_place, read_definitions
from kprobes.errors import DefinitionError, UsageError
from kprobes.model.codes import Code, rejection


def test_words_and_files_become_one_text_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "probes.txt"
    file.write_text("# reads\np vfs_read\np vfs_readv\n")

    text = read_definitions(["p vfs_open", f"@{file}", "p vfs_write"])

    wanted = ["p vfs_open", "p vfs_read", "p vfs_readv", "p vfs_write"]
    assert [line for line in text.splitlines() if line[:1] == "p"] == wanted


def test_the_kernels_boot_parameter_is_its_definitions() -> None:
    word = "kprobe_event=p:one,vfs_read,count=$arg3:u64;r,vfs_read,$retval"

    assert read_definitions([word, "p vfs_open"]).splitlines() == [
        "p:one vfs_read count=$arg3:u64",
        "r vfs_read $retval",
        "p vfs_open",
    ]
    with pytest.raises(DefinitionError) as caught:
        read_definitions(["kprobe_event=p,vfs_read;p,vfs_write,a=$foo"])
    assert caught.value.command == "p vfs_write a=$foo"


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(b"p vfs_read\n"))
    monkeypatch.setattr("sys.stdin", stdin)

    assert read_definitions(["-"]) == "p vfs_read\n"


def test_an_error_in_a_file_says_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "probes.txt"
    file.write_text("# a comment\n\np vfs_read a=$foo\n")

    with pytest.raises(DefinitionError) as caught:
        read_definitions([f"@{file}"])

    assert caught.value.__notes__ == ["line 3", str(file)]


def test_an_error_in_a_word_needs_no_line_number() -> None:
    with pytest.raises(DefinitionError) as caught:
        read_definitions(["p vfs_read a=$foo"])

    assert caught.value.__notes__ == []


def test_a_word_may_take_away_what_an_earlier_one_defined(tmp_path: Path) -> None:
    file = tmp_path / "probes.txt"
    file.write_text("p:x vfs_read\np:y vfs_read\n")

    assert read_definitions([f"@{file}", "-:x"]).endswith("-:x")
    with pytest.raises(UsageError, match="no definition"):
        read_definitions(["p:x vfs_read", "-:x"])
    with pytest.raises(DefinitionError) as caught:
        read_definitions([f"@{file}", "r:x vfs_write"])
    assert caught.value.code == "DIFF_PROBE_TYPE"


@pytest.mark.parametrize("content", ["", "# nothing\n\n"])
def test_a_file_without_definitions_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "probes.txt"
    file.write_text(content)

    with pytest.raises(UsageError, match="no definition"):
        read_definitions([f"@{file}"])


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"cannot read definitions from {tmp_path}"):
        read_definitions([f"@{tmp_path / name}"])


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "probes.txt"
    file.write_bytes(b"\xff\xfe")

    with pytest.raises(UsageError, match="not UTF-8 text"):
        read_definitions([f"@{file}"])


def test_registers_are_those_of_the_guests_own_kind() -> None:
    assert read_definitions(["p vfs_read a=%x0"], arch="arm64")
    assert read_definitions(["p vfs_read a=%di"], arch="amd64")
    assert read_definitions(["p vfs_read a=%x0 b=%di"])
    with pytest.raises(DefinitionError, match="di"):
        read_definitions(["p vfs_read a=%di"], arch="arm64")


def test_a_definition_that_only_the_kernel_refuses_is_found_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "probes.txt"
    file.write_text("p vfs_read\n# none\n  p   nosuchfn  # here\n")
    error = rejection(Code.BAD_PROBE_ADDR, command="p nosuchfn", column=2)

    add_place(error, ["p nosuchfn", f"@{file}"])

    assert error.__notes__ == ["line 3", str(file)]
