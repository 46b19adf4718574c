"""Names that a kernel's table leaves out, found by the functions that use them."""

import struct

import numpy as np
import pytest

from kprobes.arch.x86_64.machine import TEXT as INFO
from kprobes.errors import MemoryFault
from kprobes.formats.kallsyms import SymbolTable
from kprobes.image.build import Build
from kprobes.image.data_symbols import with_data_symbols

TEXT = 0xFFFF_FFFF_8100_0000
M_START, LOCATE, TABLE, OTHER = TEXT, TEXT + 0x40, TEXT + 0x80, TEXT + 0xC0
LIST, PAGES, JUMPS = TEXT + 0x1000, TEXT + 0x1100, TEXT + 0x1200
FOREIGN = TEXT + 0x1300


class Flat:
    """Memory in one piece."""

    def __init__(self) -> None:
        self.data = bytearray(0x2000)

    def read(self, addr: int, size: int) -> bytes:
        at = addr - TEXT
        if not 0 <= at <= len(self.data) - size:
            raise MemoryFault(addr, size)
        return bytes(self.data[at : at + size])

    def write(self, addr: int, data: bytes) -> None:
        self.data[addr - TEXT : addr - TEXT + len(data)] = data


def build(*more: tuple[int, bytes]) -> Build:
    names = sorted(
        [
            (TEXT, b"_stext"),
            (LIST - 8, b"_etext"),
            (M_START, b"m_start"),
            (LOCATE, b"ftrace_location_range"),
            (TABLE, b"jump_label_text_reserved"),
            (OTHER, b"other"),
            *more,
        ]
    )
    blob = b"\0" + b"\0".join(name for _, name in names) + b"\0"
    lengths = np.array([len(name) + 1 for _, name in names])
    table = SymbolTable(
        addrs=np.array([addr for addr, _ in names], np.uint64),
        types=b"T" * len(names),
        blob=blob,
        starts=(1 + np.cumsum(lengths) - lengths).astype(np.uint32),
    )
    return Build(
        banner="Linux version 6.1.0",
        build_id=b"",
        table=table,
        btf=b"",
        btf_at=0,
        type_places=np.empty(0, np.uint32),
        head=b"",
        digest=b"",
    )


def lea(*targets: int, at: int) -> bytes:
    """Return instructions that name addresses: ``lea rdi, [rip+X]``."""
    return b"".join(
        b"\x48\x8d\x3d" + struct.pack("<i", target - (at + 7 * n + 7))
        for n, target in enumerate(targets)
    )


@pytest.fixture
def memory() -> Flat:
    """A kernel with a list of modules, one page of ftrace sites and two jump labels."""
    flat = Flat()
    flat.write(M_START, lea(FOREIGN, LIST, at=M_START))
    flat.write(LOCATE, lea(PAGES, at=LOCATE))
    flat.write(TABLE, lea(JUMPS + 32, FOREIGN, JUMPS, at=TABLE))
    flat.write(LIST, struct.pack("<QQ", LIST, LIST))
    flat.write(PAGES, struct.pack("<QQQQ", PAGES + 8, 0, PAGES + 24, OTHER))
    flat.write(JUMPS, struct.pack("<iiqiiq", OTHER - JUMPS, 0, 0, OTHER - JUMPS - 16, 0, 0))
    return flat


def found(build: Build, memory: Flat) -> dict[str, int]:
    whole = with_data_symbols(build, memory, INFO, [])
    names = ("modules", "ftrace_pages_start", "__start___jump_table", "__stop___jump_table")
    addrs = {name: whole.address(name.encode()) for name in names}
    return {name: addr for name, addr in addrs.items() if addr is not None}


def test_data_is_what_looks_like_it_among_what_its_function_names(memory: Flat) -> None:
    assert found(build(), memory) == {
        "modules": LIST,
        "ftrace_pages_start": PAGES,
        "__start___jump_table": JUMPS,
        "__stop___jump_table": JUMPS + 32,
    }


def test_the_trace_and_its_clocks_are_found(memory: Flat) -> None:
    trace, clocks, local = TEXT + 0x1400, TEXT + 0x1500, TEXT + 0x100
    show, snapshot = TEXT + 0x180, TEXT + 0x140
    memory.write(snapshot, lea(LIST, trace, at=snapshot))
    memory.write(show, lea(FOREIGN, clocks, at=show))
    memory.write(trace, struct.pack("<QQQQ", LIST, LIST, 0, trace))
    memory.write(clocks, struct.pack("<QQQ", local, FOREIGN, 1))
    functions = [
        (local, b"trace_clock_local"),
        (show, b"tracing_clock_show"),
        (snapshot, b"tracing_snapshot"),
    ]

    whole = with_data_symbols(build(*functions), memory, INFO, [])

    assert whole.address(b"global_trace") == trace
    assert whole.address(b"trace_clocks") == clocks


def test_events_are_a_list_of_what_belongs_to_a_named_system(memory: Flat) -> None:
    update, events, name = TEXT + 0x140, TEXT + 0x1400, TEXT + 0x1600
    call, group = TEXT + 0x1480, TEXT + 0x1500
    memory.write(update, lea(LIST, events, at=update))
    memory.write(LIST, struct.pack("<QQ", LIST, LIST))
    memory.write(events, struct.pack("<QQ", call, call))
    memory.write(call, struct.pack("<QQQ", events, events, group))
    memory.write(group, struct.pack("<Q", name))
    memory.write(name, b"xhci-hcd\0" + bytes(16))
    known = build((update, b"trace_event_update_all"))

    assert with_data_symbols(known, memory, INFO, []).address(b"ftrace_events") == events

    memory.write(name, b"\xff\x80\0")
    assert with_data_symbols(known, memory, INFO, []).address(b"ftrace_events") is None


def test_what_looks_like_nothing_stays_unknown(memory: Flat) -> None:
    memory.write(LIST, bytes(16))
    memory.write(PAGES, struct.pack("<Q", 1 << 63))
    memory.write(JUMPS, struct.pack("<iiqiiq", 1 << 30, 0, 0, 1 << 30, 0, 0))

    assert found(build(), memory) == {}


def test_a_table_that_lists_data_is_left_alone(memory: Flat) -> None:
    listed = build((TEXT + 0x1800, b"init_task"))

    assert with_data_symbols(listed, memory, INFO, []) is listed


def test_found_names_stand_in_order_beside_the_others(memory: Flat) -> None:
    table = with_data_symbols(build(), memory, INFO, []).table

    assert sorted(table.addrs.tolist()) == table.addrs.tolist()
    at = table.addrs.tolist().index(LIST)
    assert table.blob[int(table.starts[at]) :].startswith(b"modules\0")
    assert (table.types[at : at + 1], table.types[:1]) == (b"d", b"T")


@pytest.mark.parametrize("is_relative", [True, False])
def test_each_tracepoint_is_known_by_its_name(memory: Flat, is_relative: bool) -> None:
    each, table, names = TEXT + 0x200, TEXT + 0x1600, (b"first", b"9p_second")
    points = [TEXT + 0x1700 + 0x80 * n for n in range(len(names))]
    iterators = [(TEXT + 0x300 + 0x10 * n, b"__traceiter_" + x) for n, x in enumerate(names)]
    entries = b""
    for n, (point, name) in enumerate(zip(points, names, strict=True)):
        memory.write(point, struct.pack("<Q", point + 0x40))
        memory.write(point + 0x40, name + b"\0")
        there = struct.pack("<i", point - table - 4 * n), struct.pack("<Q", point)
        entries += there[0] if is_relative else there[1]
    memory.write(table, entries)
    memory.write(each, lea(table + len(entries), table, at=each))
    kernel = build((each, b"for_each_kernel_tracepoint"), *iterators)

    whole = with_data_symbols(kernel, memory, INFO, [])

    found = [whole.address(b"__tracepoint_" + name) for name in names]
    assert found == points


def test_a_table_of_something_else_is_not_one_of_tracepoints(memory: Flat) -> None:
    each, table, point = TEXT + 0x200, TEXT + 0x1600, TEXT + 0x1700
    memory.write(point, struct.pack("<Q", point + 0x40))
    memory.write(point + 0x40, b"nobodys\0")
    memory.write(table, struct.pack("<Q", point))
    memory.write(each, lea(table + 8, table, at=each))

    whole = with_data_symbols(build((each, b"for_each_kernel_tracepoint")), memory, INFO, [])

    assert whole.address(b"__tracepoint_nobodys") is None
