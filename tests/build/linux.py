"""A guest whose RAM holds all that ``image.find`` looks for, and nothing that could run."""

import struct
from collections.abc import Sequence
from itertools import cycle, islice

from msgspec import Struct, field

from kprobes.formats.btf_index import Kind
from tests.build.btf import BtfBuilder, kernel_types
from tests.build.elf import build_id_note
from tests.build.kallsyms import Layout, Named, build, many
from tests.build.pages import NX, PAGE, WRITE, FakeRam, Pages

LINK = 0xFFFF_FFFF_8100_0000
RODATA, DATA = 0x1_0000, 0x3_0000
"""Offsets of read-only data and of data from the kernel's text."""
MODULE = 0xFFFF_FFFF_C020_0000
BANNER = "Linux version 6.1.0-test (me@here) (gcc) #1 SMP Tue"
BUILD_ID = bytes(range(20))

_TABLES, _IMAGE, _MODULE_PHYS = 0x1_0000, 0x10_0000, 0x18_0000
_NOTES_AT, _BTF_AT, _CALLS_AT, _KALLSYMS_AT = 0x200, 0x400, 0x3000, 0x4000
_CALLS = 300
_MASTER_AT, _MODULES_AT, _INFO_AT, _PGD_AT, _INFO_TEXT = 0, 0x1000, 0x1010, 0x1020, 0x2000
_USER_AT = 0x1400
_IMAGE_SIZE = 0x4_0000


class LinuxSpec(Struct, frozen=True, kw_only=True):
    """What the guest is like."""

    slide: int = 0x60_0000
    layout: Layout = Layout.V6_1
    levels: int = 4
    banner: str = BANNER
    build_id: bytes = BUILD_ID
    has_btf: bool = True
    has_kallsyms: bool = True
    has_data_symbols: bool = True
    has_master_user: bool = True
    is_protected: bool = True
    modules: tuple[str, ...] = ("alpha", "beta")
    has_module_mem: bool = False
    told_slide: int | None = None
    symbols: Sequence[Named] = field(default_factory=list[Named])

    @property
    def text(self) -> int:
        return LINK + self.slide


class LinuxGuest(Struct, frozen=True, kw_only=True):
    """The guest, the CR3 of a process in it, and what its kallsyms would print."""

    spec: LinuxSpec
    ram: FakeRam
    cr3: int
    master: int
    symbols: list[Named]

    def phys(self, addr: int) -> int:
        """Where an address of the kernel's image is in RAM."""
        return addr - self.spec.text + _IMAGE


def boot(spec: LinuxSpec | None = None, *, has_views: bool = True) -> LinuxGuest:
    """Write a guest's RAM."""
    spec = spec or LinuxSpec()
    ram = FakeRam(0x20_0000, has_views=has_views)
    btf = _types(spec).build() if spec.has_btf else b""
    symbols = _symbols(spec, btf)
    ram.write(_IMAGE, b"\x90" * 0x2000)
    ram.write(_IMAGE + RODATA, _rodata(spec, symbols, btf))
    _write_data(ram, spec)
    for i, name in enumerate(spec.modules):
        _write_module(ram, spec, i, name)
    master = _IMAGE + DATA + _MASTER_AT
    _map(Pages(ram, _TABLES, levels=spec.levels), spec)
    # The master table has the same top entries; it is one page, as init_top_pgt is.
    ram.write(master, ram.read(_TABLES, PAGE))
    return LinuxGuest(spec=spec, ram=ram, cr3=_TABLES, master=master, symbols=symbols)


def _map(pages: Pages, spec: LinuxSpec) -> None:
    flags = (0, NX, WRITE | NX) if spec.is_protected else (WRITE, WRITE, WRITE)
    edges = (0, RODATA, DATA, _IMAGE_SIZE)
    for right, start, stop in zip(flags, edges[:-1], edges[1:], strict=True):
        pages.map_range(spec.text + start, _IMAGE + start, stop - start, flags=right)
    pages.map_range(MODULE, _MODULE_PHYS, 0x4000, flags=WRITE | NX)


def _symbols(spec: LinuxSpec, btf: bytes) -> list[Named]:
    rodata, data = spec.text + RODATA, spec.text + DATA
    note_size = len(build_id_note(spec.build_id)) if spec.build_id else 0
    extra = [
        (rodata, "D", "linux_banner"),
        (rodata + _NOTES_AT, "R", "__start_notes"),
        (rodata + _NOTES_AT + note_size, "R", "__stop_notes"),
        (rodata + _BTF_AT, "R", "__start_BTF"),
        (rodata + _BTF_AT + len(btf), "R", "__stop_BTF"),
        (rodata + _CALLS_AT, "R", "sys_call_table"),
        (data + _MASTER_AT, "D", "init_top_pgt"),
        (data + _MODULES_AT, "d", "modules"),
        (data + _INFO_AT, "B", "vmcoreinfo_data"),
    ]
    texts = [*many(spec.text, 300)[:-1], *spec.symbols]
    if spec.has_master_user:
        texts.append((spec.text + _USER_AT, "T", "lookup_address"))
    texts.append((spec.text + _IMAGE_SIZE, "B", "_end"))
    return sorted(texts + extra * spec.has_data_symbols, key=lambda symbol: symbol[0])


def _rodata(spec: LinuxSpec, symbols: list[Named], btf: bytes) -> bytes:
    before = bytearray(_KALLSYMS_AT)
    banner = spec.banner.encode() + b"\n\0"
    before[: len(banner)] = banner
    note = build_id_note(spec.build_id) if spec.build_id else b""
    before[_NOTES_AT : _NOTES_AT + len(note)] = note
    before[_BTF_AT : _BTF_AT + len(btf)] = btf
    calls = cycle(addr for addr, letter, _ in symbols if letter in "tT")
    before[_CALLS_AT : _CALLS_AT + 8 * _CALLS] = struct.pack(f"<{_CALLS}Q", *islice(calls, _CALLS))
    assert len(before) == _KALLSYMS_AT
    if not spec.has_kallsyms:
        return bytes(before)
    addr = spec.text + RODATA
    tables = build(symbols, spec.layout, addr=addr, base=spec.text, before=bytes(before))
    assert len(tables.data) <= DATA - RODATA
    return tables.data


def _write_data(ram: FakeRam, spec: LinuxSpec) -> None:
    at, virt = _IMAGE + DATA, spec.text + DATA
    links = [virt + _MODULES_AT, *(MODULE + 0x1000 * i + 8 for i in range(len(spec.modules)))]
    ram.write(at + _MODULES_AT, struct.pack("<QQ", (links + links)[1], links[-1]))
    # add rdi, [rip + OFFSET]: init_mm.pgd.
    offset = DATA + _PGD_AT - _USER_AT - 7
    ram.write(_IMAGE + _USER_AT, b"\x48\x03\x3d" + struct.pack("<i", offset))
    ram.write(at + _PGD_AT, struct.pack("<Q", virt + _MASTER_AT))
    if spec.told_slide is not None:
        ram.write(at + _INFO_AT, struct.pack("<Q", virt + _INFO_TEXT))
        ram.write(at + _INFO_TEXT, _vmcoreinfo(spec))


def _vmcoreinfo(spec: LinuxSpec) -> bytes:
    master = spec.text + DATA + _MASTER_AT
    base = _IMAGE + DATA + _MASTER_AT - (master - 0xFFFF_FFFF_8000_0000)
    return (
        f"OSRELEASE=6.1.0-test\nBUILD-ID={spec.build_id.hex()}\n"
        f"SYMBOL(swapper_pg_dir)={master:x}\nNUMBER(phys_base)={base}\n"
        f"KERNELOFFSET={spec.told_slide:x}\n"
    ).encode()


def _types(spec: LinuxSpec) -> BtfBuilder:
    b = kernel_types()
    u32, char = b.int_("unsigned int", 4), b.int_("char", 1)
    ptr = b.ptr(0)
    (u64,) = (b.int_("u64", 8),)
    lists = b.struct("list_head", 16, [("next", ptr, 0), ("prev", ptr, 64)])
    b.struct("kernel_symbol", 12, [("value_offset", u32, 0), ("name_offset", u32, 32)])
    b.struct("mod_kallsyms", 32, [
        ("symtab", ptr, 0), ("num_symtab", u32, 64), ("strtab", ptr, 128), ("typetab", ptr, 192),
    ])  # fmt: skip
    memory = "module_memory" if spec.has_module_mem else "module_layout"
    piece = b.struct(memory, 16, [("base", ptr, 0), ("size", u32, 64)])
    pieces = (
        [("mem", b.array(piece, 2), 1024)]
        if spec.has_module_mem
        else [("core_layout", piece, 1024), ("init_layout", piece, 1152)]
    )
    b.struct("module", 256, [
        ("state", u32, 0), ("list", lists, 64), ("name", b.array(char, 56), 192),
        ("syms", ptr, 640), ("num_syms", u32, 704), ("kallsyms", ptr, 768), ("pad", u64, 832),
        *pieces,
    ])  # fmt: skip
    b.add(Kind.FWD, "elf64_sym")
    return b


def module_symbols(name: str, base: int) -> list[Named]:
    """What a module's names are, in its own order: aliases, and addresses that do not ascend."""
    return [
        (base + 0xC40, "t", f"{name}_init"),
        (base + 0xC00, "T", f"{name}_open"),
        (base + 0xC00, "t", f"__{name}_open"),
        (base + 0xD00, "d", f"{name}_data"),
    ]


def _write_module(ram: FakeRam, spec: LinuxSpec, i: int, name: str) -> None:
    base, n = MODULE + 0x1000 * i, len(spec.modules)
    follow = MODULE + 0x1000 * (i + 1) + 8 if i + 1 < n else spec.text + DATA + _MODULES_AT
    symbols = module_symbols(name, base)
    struct_module = bytearray(256)
    struct_module[8:16] = struct.pack("<Q", follow)
    struct_module[24 : 24 + len(name)] = name.encode()
    struct_module[80:92] = struct.pack("<QI", base + 0x700, 1)
    struct_module[96:104] = struct.pack("<Q", base + 0x100)
    struct_module[128:140] = struct.pack("<QI", base + 0xC00, 0x200)
    at = _MODULE_PHYS + 0x1000 * i
    ram.write(at, bytes(struct_module))
    ram.write(
        at + 0x100,
        struct.pack("<QQQQ", base + 0x200, len(symbols) + 1, base + 0x400, base + 0x600),
    )
    strings = bytearray(b"\0")
    syms = bytes(24)
    for addr, _, text in symbols:
        syms += struct.pack("<IBBHQQ", len(strings), 0, 0, 1, addr, 0)
        strings += text.encode() + b"\0"
    ram.write(at + 0x200, syms)
    ram.write(at + 0x400, bytes(strings))
    ram.write(at + 0x600, b"?" + "".join(kind.lower() for _, kind, _ in symbols).encode())
    ram.write(at + 0x700, struct.pack("<iii", 0xC00 - 0x700, 0x780 - 0x704, 0))
    ram.write(at + 0x780, f"{name}_open".encode() + b"\0")
