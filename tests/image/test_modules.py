"""Symbols of loaded modules in guest memory."""

import pytest

from kprobes.arch.x86_64.paging import PageTables
from kprobes.image.modules import read_modules
from kprobes.image.symbols import ModuleSymbols
from kprobes.image.types import BtfTypes, parse_types
from tests.build.btf import kernel_types
from tests.build.kallsyms import Named
from tests.build.linux import DATA, MODULE, LinuxGuest, LinuxSpec, boot, module_symbols

MODULE_PHYS = 0x18_0000


def types(guest: LinuxGuest) -> BtfTypes:
    data = bytes(guest.ram.data)
    found = parse_types(data[data.index(b"\x9f\xeb\x01") :])
    assert found is not None
    return found


def read(guest: LinuxGuest) -> tuple[ModuleSymbols, ...]:
    head = guest.spec.text + DATA + 0x1000
    return read_modules(PageTables(guest.ram, guest.cr3), head, types(guest))


def rows(module: ModuleSymbols) -> list[Named]:
    names = module.table.blob[1:-1].decode().split("\0")
    return list(zip(module.table.addrs.tolist(), module.table.types.decode(), names, strict=True))


@pytest.mark.parametrize("has_module_mem", [False, True], ids=["core_layout", "mem"])
def test_every_module_has_its_symbols_and_its_memory(has_module_mem: bool) -> None:
    first, second = read(boot(LinuxSpec(has_module_mem=has_module_mem)))

    assert (first.name, second.name) == ("alpha", "beta")
    assert rows(first) == module_symbols("alpha", MODULE)
    assert first.ranges == ((MODULE + 0xC00, MODULE + 0xE00),)


def test_only_exported_symbols_are_capitals() -> None:
    guest = boot()
    guest.ram.write(MODULE_PHYS + 88, bytes(4))

    first, second = read(guest)

    assert first.table.types == b"tttd"
    assert second.table.types == b"tTtd"


def test_a_module_that_is_still_being_made_is_left_out() -> None:
    guest = boot()
    guest.ram.write(MODULE_PHYS, (3).to_bytes(4, "little"))

    assert [module.name for module in read(guest)] == ["beta"]


@pytest.mark.parametrize("at", [96, 0x100, 0x110, 0x118, 80])
def test_a_module_with_a_wild_pointer_is_left_out(at: int) -> None:
    guest = boot()
    guest.ram.write(MODULE_PHYS + at, (0x4141_4141_4141_4141).to_bytes(8, "little"))

    names = [module.name for module in read(guest)]

    # Strings that do not read leave a module without names, all else leaves it out.
    assert names == ["beta"] or (at == 0x110 and names == ["alpha", "beta"])


def test_a_count_beyond_reason_reads_no_more_than_there_is() -> None:
    guest = boot()
    guest.ram.write(MODULE_PHYS + 0x108, b"\xff\xff\xff\xff")

    assert [module.name for module in read(guest)] == ["beta"]


def test_types_without_modules_give_none() -> None:
    guest = boot()
    bare = parse_types(kernel_types().build())
    memory = PageTables(guest.ram, guest.cr3)

    assert read_modules(memory, guest.spec.text + DATA + 0x1000, bare) == ()
    assert read_modules(memory, None, types(guest)) == ()
    assert read_modules(memory, guest.spec.text, None) == ()
