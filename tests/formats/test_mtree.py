import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import FormatError
from kprobes.formats.mtree import MAX_RUNS, RamRun, parse_mtree
from kprobes.units import Phys

QEMU_7 = """FlatView #0
 AS "I/O", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan

FlatView #1
 AS "cpu-smm-0", root: memory
 Root memory region: memory
  0000000000000000-00000000000bffff (prio 0, ram): pc.ram

FlatView #2
 AS "memory", root: system
 AS "cpu-memory-0", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
  00000000000c0000-00000000000cafff (prio 0, rom): pc.ram @00000000000c0000
  00000000000cb000-00000000000cdfff (prio 0, ram): pc.ram @00000000000cb000
  0000000000100000-00000000bfffffff (prio 0, ram): pc.ram @0000000000100000
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
  00000000febf0400-00000000febf041f (prio 0, i/o): vga ioports remapped
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios
  0000000100000000-000000013fffffff (prio 0, ram): pc.ram @00000000c0000000

FlatView #3
 AS "VGA", root: bus master container
 Root memory region: (none)
  No rendered FlatView

"""
QEMU_10_KVM = """FlatView #0
 AS "memory", root: system
 Root memory region: system
  0000000000000000-000000003fffffff (prio 0, ram): /objects/node 0 KVM
  0000000040000000-000000007fffffff (prio 0, ram): /objects/node 0 @0000000040000000 KVM
  0000000080000000-00000000bfffffff (prio 0, nv-ram): mem1 @0000000000001000
  00000000c0000000-00000000c0000fff (prio 0, ramd): 0000:01:00.0 BAR 0 mmaps[0] KVM
  00000000c0001000-00000000c0001fff (prio 0, romd): flash
"""


def run(start: int, size: int, block: str, offset: int) -> RamRun:
    return RamRun(start=Phys(start), size=size, block=block, offset=offset)


def test_the_system_view_of_qemu_7_is_found_among_others() -> None:
    assert parse_mtree(QEMU_7) == (
        run(0, 0xA0000, "pc.ram", 0),
        run(0xCB000, 0x3000, "pc.ram", 0xCB000),
        run(0x100000, 0xBFF00000, "pc.ram", 0x100000),
        run(0x1_0000_0000, 0x4000_0000, "pc.ram", 0xC000_0000),
    )


def test_the_accelerators_name_is_no_part_of_the_block() -> None:
    assert parse_mtree(QEMU_10_KVM.replace("\n", "\r\n")) == (
        run(0, 0x8000_0000, "/objects/node 0", 0),
        run(0x8000_0000, 0x4000_0000, "mem1", 0x1000),
    )


def line(start: int, stop: int, offset: int = 0) -> str:
    return f"  {start:016x}-{stop:016x} (prio 0, ram): r @{offset:016x}\n"


def view(*lines: str) -> str:
    return 'FlatView #0\n AS "memory", root: system\n' + "".join(lines)


def test_neighbours_that_lie_apart_in_the_block_stay_two() -> None:
    runs = parse_mtree(view(line(0, 0xFFF), line(0x1000, 0x1FFF, 0x5000)))

    assert [(found.start, found.offset) for found in runs] == [(0, 0), (0x1000, 0x5000)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unknown command: 'info mtree'",
        view(),
        view(line(0x1000, 0)),
        view(line(0, (1 << 64) - 1)),
        view(line(0, 0x1FFF), line(0x1000, 0x2FFF)),
        view(line(0x2000, 0x2FFF), line(0, 0xFFF)),
        view(*(line(0x2000 * i, 0x2000 * i + 0xFFF) for i in range(MAX_RUNS + 1))),
    ],
)
def test_a_senseless_view_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_mtree(text)


@given(st.text(alphabet="0123456789abcdef-() prio,ram:@\n", max_size=200))
def test_any_text_gives_runs_or_a_format_error(text: str) -> None:
    try:
        runs = parse_mtree(view(text))
    except FormatError:
        return

    assert all(found.size > 0 for found in runs)
