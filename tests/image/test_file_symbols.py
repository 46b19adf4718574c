"""Symbols of a kernel that carries none: whose file has them, and whose has not."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kprobes.arch.x86_64.paging import PageTables
from kprobes.errors import FormatError, TargetError
from kprobes.formats.kallsyms import SymbolTable
from kprobes.formats.strtab import Names
from kprobes.image.build import Build, Region, extract
from kprobes.image.file import read_symbols, symbols_of
from kprobes.units import Addr
from tests.build.elf import Elf, ElfSymbol
from tests.build.kallsyms import Named
from tests.build.linux import BANNER, BUILD_ID, RODATA, LinuxSpec, boot

SPEC = LinuxSpec(has_kallsyms=False)


def linked(spec: LinuxSpec = SPEC) -> list[Named]:
    return [(addr - spec.slide, letter, name) for addr, letter, name in boot(spec).symbols]


def system_map(path: Path, symbols: Iterable[Named]) -> Path:
    path.write_text("".join(f"{addr:016x} {letter} {name}\n" for addr, letter, name in symbols))
    return path


def found(*files: Path, spec: LinuxSpec = SPEC, is_file: bool = False) -> Build:
    guest = boot(spec)
    start = spec.text + RODATA
    region = Region(addr=Addr(start), data=guest.ram.read(guest.phys(start), 0x2_0000))
    asked: list[tuple[str, bytes]] = []

    def tables(release: str, build_id: bytes) -> Iterator[SymbolTable]:
        asked.append((release, build_id))
        yield from symbols_of(files)

    build = extract(PageTables(guest.ram, guest.cr3), [region], tables, is_file=is_file)
    assert asked == [("6.1.0-test", BUILD_ID)]
    return build


@pytest.mark.parametrize("slide", [0, 0x60_0000])
def test_a_system_map_gives_a_kernel_its_symbols_where_it_runs(tmp_path: Path, slide: int) -> None:
    spec = LinuxSpec(has_kallsyms=False, slide=slide)

    build = found(system_map(tmp_path / "System.map", linked(spec)), spec=spec)

    names = Names(build.table.blob, build.table.starts)
    assert build.table.addrs.tolist() == [addr for addr, _, _ in boot(spec).symbols]
    assert [names.name(n).decode() for n in range(len(names))] == [s[2] for s in boot(spec).symbols]
    assert (build.banner, build.build_id, build.text) == (BANNER, BUILD_ID, spec.text)
    assert build.btf


def test_a_vmlinux_does_as_well(tmp_path: Path) -> None:
    sections = {"t": ".text", "r": ".rodata", "d": ".data", "b": ".bss"}
    path = tmp_path / "vmlinux"
    symbols = [
        ElfSymbol(name=name, addr=addr, section=sections[letter.lower()])
        for addr, letter, name in linked()
    ]
    path.write_bytes(Elf(symbols=symbols).data)

    assert found(path).text == SPEC.text


def test_another_builds_symbols_are_none_of_it(tmp_path: Path) -> None:
    moved = [(addr + 16 * (letter in "tT"), letter, name) for addr, letter, name in linked()]
    elsewhere = [(addr, letter, name) for addr, letter, name in linked() if name != "linux_banner"]
    uncalled = [row for row in linked() if row[2] != "sys_call_table"]
    others = [
        system_map(tmp_path / str(n), each) for n, each in enumerate([moved, elsewhere, uncalled])
    ]

    with pytest.raises(TargetError, match="no intact kallsyms tables in its memory: name"):
        found(*others)

    own = system_map(tmp_path / "System.map", linked())
    assert found(*others, tmp_path / "none", own).text == SPEC.text


def test_a_file_may_not_be_relocated_yet(tmp_path: Path) -> None:
    spec = LinuxSpec(has_kallsyms=False, slide=0)
    path = system_map(tmp_path / "System.map", linked(spec))

    assert found(path, spec=spec, is_file=True).text == spec.text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "has no symbols"),
        (b"#!/bin/sh\n", "neither a System.map nor a vmlinux"),
        (b"c1000000 T _stext\n", "neither a System.map nor a vmlinux"),
        (Elf(symbols=None).data, "has no symbols"),
        (Elf(symbols=[]).data[:70], "neither a System.map nor a vmlinux"),
    ],
)
def test_what_has_none_is_an_error_with_its_name(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)

    with pytest.raises(FormatError, match=f"{path}.*{why}"):
        read_symbols(path)
    with pytest.raises(TargetError, match="cannot read"):
        read_symbols(tmp_path)
