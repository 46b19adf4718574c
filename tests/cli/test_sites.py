"""``kprobe sites`` on files: what is shown, and what is refused."""

import re
from pathlib import Path

import pytest

from kprobes.arch.entry import EntryKind
from kprobes.cli.main import main
from kprobes.inspect.subject import TextSnapshot
from tests.build.json_lines import objects
from tests.build.objects import FOLDER
from tests.build.snapshot import SLIDE, make_snapshot

OBJECT = str(FOLDER / "gcc-fentry.o")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["sites", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_functions_of_a_file_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, OBJECT)

    assert (status, err) == (0, "4 functions: 1 without a site, 3 with a call\n")
    assert out.splitlines() == [
        "FUNCTION               ADDRESS  IN FILE",
        "leaf                   0x0      call __fentry__ +0x0",
        "work                   0x10     call __fentry__ +0x0",
        "plain                  0x40     -",
        "rare [.text.unlikely]  0x0      call __fentry__ +0x0",
    ]
    assert run(capsys, OBJECT, "[rw]*", "-q")[1].count("\n") == 3


def test_one_function_is_shown_by_its_instructions(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, str(FOLDER / "arm64-kcfi.o"), "work")

    assert (status, err) == (0, "")
    lines = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    nops = "# nops before the function, in __patchable_function_entries"
    assert lines[:9] == [
        ["work", "0xc, 72 bytes, .text"],
        ["-0xc", "94 07 05 00", "# kCFI: hash of the function's type"],
        ["-0x8", "1f 20 03 d5 1f 20 03 d5", nops],
        ["+0x0", "5f 24 03 d5", "bti c", "# landing pad"],
        ["+0x4", "1f 20 03 d5", "nop", "# nops"],
        ["+0x8", "1f 20 03 d5", "nop"],
        ["+0xc", "3f 23 03 d5", "paciasp", "# signs the return address"],
        ["+0x10", "fd 7b be a9", "stp x29, x30, [sp, #-0x20]!", "# prologue"],
        ["+0x14", "f4 4f 01 a9", "stp x20, x19, [sp, #0x10]"],
    ]


def test_json_is_an_object_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, OBJECT, "work", "--format", "json")

    (found,) = objects("sites", out)
    site = {
        "kind": "call",
        "offset": 0,
        "bytes": "ff1500000000",
        "text": "callq *0x0(%rip)",
        "callee": "__fentry__",
        "tables": ["__mcount_loc"],
    }
    assert status == 0
    assert found["file"][0] == site
    assert {name: found[name] for name in ("function", "address", "size", "owner", "memory")} == {
        "function": "work",
        "address": "0x10",
        "size": 39,
        "owner": ".text",
        "memory": None,
    }


def test_of_a_kernel_what_differs_is_shown_from_both_sides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read(path: Path) -> TextSnapshot:
        del path
        return make_snapshot(slide=SLIDE)

    monkeypatch.setattr("kprobes.inspect.subject.snapshot_of_image", read)
    image = tmp_path / "vmlinuz"
    image.write_bytes(b"MZ")

    one = run(capsys, str(image), "f")[1].splitlines()
    several = run(capsys, str(image), "f*")[1].splitlines()

    assert [line[:4] for line in one[1:4]] == ["  - ", "  + ", "    "]
    assert "call __fentry__" in one[1]
    assert one[2].endswith("# site: nop, in __mcount_loc")
    assert several[1].split("  ")[-2:] == ["call __fentry__ +0x0", "nop +0x0"]


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        ([OBJECT, "nothing*"], 1, f"no function matches 'nothing*' in {OBJECT}"),
        (["/no/such/file"], 1, "cannot read /no/such/file: no such file"),
        (["one", "two"], 2, "no such file: one"),
        ([OBJECT, "f", "g"], 2, "no such file: f"),
        ([OBJECT, "--cpus", "2"], 2, "--cpus is for a guest; with a FILE there is none"),
        ([OBJECT, "--vmlinux", "v"], 2, "--vmlinux is for a guest; with a FILE there is none"),
        (["-t", "qemu:/s.sock", OBJECT, "f"], 2, "with a target there is no FILE"),
        (["-t", "qemu:/nonexistent.sock", "f"], 3, ""),
        ([__file__], 1, "neither a vmlinux nor a Linux boot image"),
    ],
)
def test_what_cannot_be_shown_is_said(
    capsys: pytest.CaptureFixture[str], words: list[str], status: int, why: str
) -> None:
    found, out, err = run(capsys, *words)

    assert (found, out) == (status, "")
    assert why in err
    assert err.count("\n") == 1


_PAGE = Path(__file__).parents[2] / "docs" / "howto" / "sites.md"
_SHOWN = re.findall(r"```\n\$ kprobe sites (\w+\.o.*)\n([^`]*)```", _PAGE.read_text())


@pytest.mark.parametrize(("line", "shown"), _SHOWN, ids=[line for line, _ in _SHOWN])
def test_the_page_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    line: str,
    shown: str,
) -> None:
    for name, path in (("prog.o", "gcc-fentry.o"), ("checked.o", "clang-kcfi.o")):
        (tmp_path / name).write_bytes((FOLDER / path).read_bytes())
    monkeypatch.chdir(tmp_path)

    assert run(capsys, *line.split())[:2] == (0, shown)


def test_the_page_names_every_kind() -> None:
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (`.*?) \|", _PAGE.read_text())))

    assert sorted(named) == sorted(EntryKind)
