"""Entries of functions in files that compilers made, and in a kernel on both sides."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kprobes.arch.entry import MCOUNT_LOC, PATCHABLE
from kprobes.errors import FormatError, TargetError
from kprobes.inspect.sites import (
    EntrySide,
    counted,
    is_kernel,
    sites_of_file,
    sites_of_kernel,
)
from tests.build.elf import vmlinux
from tests.build.kernel import SITE, symbol
from tests.build.objects import COMMANDS, FOLDER
from tests.build.snapshot import FENTRY, NOP, REST, SLIDE, call, make_snapshot

Part = tuple[str, int, str, str, tuple[str, ...]]
_X86_FRAME: list[Part] = [("prologue", 0, "55", "", ()), ("prologue", 1, "4889e5", "", ())]
_A64_NOPS = "1f2003d51f2003d5"


def _a64_frame(at: int) -> list[Part]:
    second = ("prologue", at + 8, "fd030091", "", ())
    return [("prologue", at, "fd7bbea9", "", ()), second]


WORK: Mapping[str, list[Part]] = {
    "gcc-pg.o": [*_X86_FRAME, ("call", 7, "ff1500000000", "mcount", ())],
    "gcc-fentry.o": [
        ("call", 0, "ff1500000000", "__fentry__", (MCOUNT_LOC,)),
    ],
    "gcc-nop.o": [
        ("nop", 0, "0f1f440000", "", (MCOUNT_LOC,)),
    ],
    "gcc-nop-unlisted.o": [("nop", 0, "0f1f440000", "", ())],
    "gcc-patchable.o": [
        ("patchable_before", -2, "9090", "", (PATCHABLE,)),
        ("landing_pad", 0, "f30f1efa", "", ()),
        ("patchable", 4, "909090", "", ()),
    ],
    "gcc-linked.so": [
        ("call", 0, "ff155a1c0000", "__fentry__", (MCOUNT_LOC,)),
    ],
    "clang-pg.o": [*_X86_FRAME, ("call", 9, "e800000000", "mcount", ())],
    "clang-fentry.o": [("call", 0, "e800000000", "__fentry__", ())],
    "clang-patchable.o": [
        ("patchable_before", -2, "9090", "", (PATCHABLE,)),
        ("patchable", 0, "0f1f00", "", ()),
    ],
    "clang-kcfi.o": [
        ("kcfi", -16, "b894070500", "", ()),
        ("patchable_before", -11, "90" * 11, "", (PATCHABLE,)),
        ("landing_pad", 0, "f30f1efa", "", ()),
    ],
    "clang-linked.so": [("call", 0, "e8bbffffff", "__fentry__", ())],
    "arm64-pg.o": [*_a64_frame(0), ("call", 16, "00000094", "_mcount", ())],
    "arm64-patchable.o": [("patchable", 0, _A64_NOPS, "", (PATCHABLE,)), *_a64_frame(8)],
    "arm64-before.o": [
        ("patchable_before", -8, _A64_NOPS, "", (PATCHABLE,)),
        ("landing_pad", 0, "5f2403d5", "", ()),
        ("patchable", 4, _A64_NOPS, "", ()),
        *_a64_frame(12),
    ],
    "arm64-kcfi.o": [
        ("kcfi", -12, "94070500", "", ()),
        ("patchable_before", -8, _A64_NOPS, "", (PATCHABLE,)),
        ("landing_pad", 0, "5f2403d5", "", ()),
        ("patchable", 4, _A64_NOPS, "", ()),
        ("signing", 12, "3f2303d5", "", ()),
        *_a64_frame(16),
    ],
    "arm64-linked.so": [*_a64_frame(0), ("call", 16, "31000094", "_mcount", ())],
}
"""What objdump and readelf show of ``work``."""


def parts(side: EntrySide | None) -> list[Part]:
    assert side is not None
    return [
        (part.kind.value, part.offset, part.code.hex(), part.callee, part.tables)
        for part in side.parts
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_an_entry_is_what_its_compiler_wrote(name: str) -> None:
    (entry,) = sites_of_file(FOLDER / name, "work")

    assert parts(entry.file) == WORK[name]
    assert entry.memory is None


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_not_instrumented_has_no_site(name: str) -> None:
    found = {each.name: each for each in sites_of_file(FOLDER / name, "*")}

    assert found.keys() == {"leaf", "work", "rare", "plain"}
    is_of_profilers = "patchable" not in name and name not in ("clang-kcfi.o", "arm64-kcfi.o")
    is_of_profilers = is_of_profilers and name != "arm64-before.o"
    assert {each.name for each in found.values() if each.now.site} == (
        {"leaf", "work", "rare"} if is_of_profilers else set()
    )
    # The option prepares all, whatever they say of profilers.
    assert found["plain"].now.is_prepared is not is_of_profilers


def test_they_are_counted_by_what_is_there() -> None:
    assert counted(sites_of_file(FOLDER / "gcc-fentry.o", "*")) == {"call": 3, "": 1}
    assert counted(sites_of_file(FOLDER / "gcc-patchable.o", "*")) == {"patchable": 4}


def test_of_a_running_kernel_both_sides_are_read() -> None:
    snapshot = make_snapshot(slide=SLIDE)

    (entry,) = sites_of_kernel(snapshot, "f")

    assert parts(entry.file)[0] == ("call", 0, call(FENTRY), "__fentry__", (MCOUNT_LOC,))
    assert parts(entry.memory)[0] == ("nop", 0, NOP, "", (MCOUNT_LOC,))
    assert (entry.name, entry.addr) == ("f", SITE)
    assert entry.now is entry.memory


@pytest.mark.parametrize("cut", range(1, 9))
def test_an_instruction_that_is_cut_off_is_left_out(cut: int) -> None:
    # mov %gs:0x28,%rax, after as many nops as leave some of it.
    code = NOP + "90" * (32 - 5 - cut) + "65488b042528000000" + REST
    snapshot = make_snapshot(code, call(FENTRY) + code[10:])

    (entry,) = sites_of_kernel(snapshot, "f")

    for side in (entry.file, entry.memory):
        assert side is not None
        assert sum(len(line.code) for line in side.lines) == 32 - cut
        assert side.lines[-1].text == "nop"
        assert side.stop == 5


def test_a_site_in_use_says_whom_it_calls() -> None:
    tracer = symbol("ftrace_caller", SITE + 0x1000)

    (entry,) = sites_of_kernel(make_snapshot(call(SITE + 0x1000) + REST, symbols=[tracer]), "f")

    assert parts(entry.memory)[0][:4] == ("call", 0, call(SITE + 0x1000), "ftrace_caller")


def test_padding_is_known_by_its_symbol() -> None:
    before = symbol("__pfx_f", SITE - 16, size=16)
    snapshot = make_snapshot(pieces={SITE - 32: "cc" * 16 + "90" * 16}, symbols=[before])

    found = list(sites_of_kernel(snapshot, "*f"))

    assert [each.name for each in found] == ["f"]
    assert parts(found[0].memory)[0] == ("padding", -16, "90" * 16, "", ())


def test_files_of_kernels_are_told_from_others(tmp_path: Path) -> None:
    kernel, image = tmp_path / "vmlinux", tmp_path / "bzImage"
    kernel.write_bytes(vmlinux([(SITE, b"Linux version 6.1.0 (x)\0")]))
    image.write_bytes(b"MZ" + bytes(100))

    assert [is_kernel(path) for path in (kernel, image)] == [True, True]
    assert not any(is_kernel(FOLDER / name) for name in COMMANDS)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    damaged = tmp_path / "x.o"
    damaged.write_bytes((FOLDER / "gcc-pg.o").read_bytes()[:900])

    with pytest.raises(TargetError, match="no such file"):
        list(sites_of_file(tmp_path / "none.o", "*"))
    with pytest.raises(FormatError, match=r"x\.o: ELF: it is damaged"):
        list(sites_of_file(damaged, "*"))
