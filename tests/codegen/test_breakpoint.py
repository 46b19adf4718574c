"""The guest's callback for breakpoints, run on an emulated CPU: whose they are, and where to."""

from random import Random

import pytest

from kprobes.arch.arch import PREAMBLE_SIZE
from kprobes.arch.x86_64.arch import X86_64
from kprobes.arch.x86_64.registers import NAMES
from kprobes.codegen.breakpoint import (
    BLOCK_MASK,
    BLOCK_SIZE,
    BLOCK_TABLE,
    EMPTY_TABLE,
    compile_notifier,
    first_entry,
    hash_table,
    table_mask,
)
from kprobes.guest.arena import NOTIFIER_SIZE
from kprobes.units import U64, Addr
from tests.build.cpu import GPRS, Cpu
from tests.build.kernel import TEXT

CODE = 0xFFFF_FFFF_C000_0000
DATA = 0xFFFF_C900_0000_0000
BLOCK, ARGS, REGS, TABLE = DATA, DATA + 0x100, DATA + 0x200, DATA + 0x1000
STACK, RETURN = DATA + 0x8000, CODE + 0x800
USER = 0x40_0000
SITES = [Addr(TEXT + 0x10 * n) for n in range(64)]
DETOURS = {site: Addr(CODE + 0x1_0000 + 0x40 * n) for n, site in enumerate(SITES)}
BREAKPOINT, NOT_OURS, STOP = 2, 0, 0x8001
"""DIE_INT3, NOTIFY_DONE, NOTIFY_STOP."""
TRAP_IP = 8 * NAMES.index("ip")
INT3, NOP = b"\xcc", b"\x90"


@pytest.fixture(scope="module")
def code() -> bytes:
    return compile_notifier(X86_64)


class Caller:
    """A kernel that has run into a breakpoint, and asks our callback."""

    def __init__(self, code: bytes, table: bytes) -> None:
        regions = [(CODE, 0x1000), (DATA, 0x1_0000), (TEXT, 0x1000), (USER, 0x1000)]
        self.cpu = Cpu(regions, [])
        self.cpu.add_exit(RETURN)
        self.cpu.write(CODE, code)
        self.cpu.write(TABLE, table)
        self.cpu.set_number(BLOCK + BLOCK_TABLE, TABLE)
        self.cpu.set_number(BLOCK + BLOCK_MASK, table_mask(table))
        self.cpu.set_number(ARGS, REGS)

    def ask(self, addr: int, *, action: int = BREAKPOINT) -> tuple[int, int]:
        """Return what the callback says of a breakpoint, and where the CPU goes on."""
        cpu, random = self.cpu, Random(addr)
        cpu.set_number(REGS + TRAP_IP, addr + len(INT3))
        before = {name: random.getrandbits(64) for name in GPRS}
        cpu.set_registers({**before, "di": BLOCK, "si": action, "dx": ARGS, "sp": STACK})
        cpu.set_number(STACK, RETURN)
        cpu.writes.clear()
        assert cpu.run(CODE) == RETURN
        after = cpu.registers()
        kept = ("bx", "bp", "r12", "r13", "r14", "r15")
        assert [after[name] for name in kept] == [before[name] for name in kept]
        assert after["sp"] == STACK + 8
        return after["ax"] & 0xFFFF_FFFF, cpu.number(REGS + TRAP_IP)


def test_every_breakpoint_of_ours_goes_on_in_its_detour(code: bytes) -> None:
    caller = Caller(code, hash_table(DETOURS))

    for site, detour in DETOURS.items():
        assert caller.ask(site) == (STOP, detour)
        # Nothing else of the interrupted task is changed.
        assert [write.addr for write in caller.cpu.writes] == [REGS + TRAP_IP]


@pytest.mark.parametrize("sites", [SITES, SITES[:1], []])
def test_a_breakpoint_that_is_somebody_else_s_is_left_to_them(
    code: bytes, sites: list[Addr]
) -> None:
    caller = Caller(code, hash_table({site: DETOURS[site] for site in sites}))
    other = TEXT + 0x801
    caller.cpu.write(other, INT3)

    assert caller.ask(other) == (NOT_OURS, other + 1)


@pytest.mark.parametrize("table", [EMPTY_TABLE, hash_table({}), hash_table(DETOURS)])
def test_a_breakpoint_that_has_gone_meanwhile_is_run_again(code: bytes, table: bytes) -> None:
    caller = Caller(code, table)
    gone = TEXT + 0x805
    caller.cpu.write(gone, NOP)

    assert caller.ask(gone) == (STOP, gone)


@pytest.mark.parametrize("addr", [USER + 0x10, 0, 0x7FFF_FFFF_EFFF])
def test_a_breakpoint_of_user_space_is_never_ours(code: bytes, addr: int) -> None:
    caller = Caller(code, hash_table({Addr(addr): Addr(CODE)}))

    assert caller.ask(addr) == (NOT_OURS, addr + 1)
    assert caller.cpu.writes == []


@pytest.mark.parametrize("action", [0, 1, 3, 9, BREAKPOINT | 1 << 32, U64])
def test_what_is_no_breakpoint_is_left_alone_even_at_an_address_of_ours(
    code: bytes, action: int
) -> None:
    caller = Caller(code, hash_table(DETOURS))

    assert caller.ask(SITES[0], action=action) == (NOT_OURS, SITES[0] + 1)


def _clash(count: int) -> list[Addr]:
    """Return addresses whose search begins at one entry, the last of the table."""
    wanted = table_mask(hash_table(dict.fromkeys(SITES[:count], Addr(CODE))))
    found: list[Addr] = []
    addr = TEXT
    while len(found) < count:
        addr += 1
        if first_entry(addr, wanted) == wanted:
            found.append(Addr(addr))
    return found


def test_addresses_that_clash_are_found_round_the_table_s_end(code: bytes) -> None:
    clashing = _clash(4)
    detours = {site: Addr(CODE + 0x40 * n) for n, site in enumerate(clashing)}
    table = hash_table(detours)
    caller = Caller(code, table)

    for site, detour in detours.items():
        assert caller.ask(site) == (STOP, detour)
    # They wrap: the last entry is in use, and so is the first.
    assert any(table[:8])
    assert any(table[-16:-8])


def test_a_stranger_who_clashes_with_ours_is_no_one_of_ours(code: bytes) -> None:
    *clashing, other = _clash(4)
    mask = table_mask(hash_table(dict.fromkeys(clashing, Addr(CODE))))
    assert first_entry(other, mask) == mask
    caller = Caller(code, hash_table(dict.fromkeys(clashing, Addr(CODE))))
    caller.cpu.write(other, INT3)

    assert caller.ask(other) == (NOT_OURS, other + 1)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 9, 1000])
def test_a_table_is_never_more_than_half_full(count: int) -> None:
    table = hash_table({Addr(TEXT + 7 * n): Addr(CODE + n) for n in range(count)})

    keys = [table[at : at + 8] for at in range(0, len(table), 16)]
    assert sum(map(any, keys)) == count
    assert 2 * count <= len(keys) == table_mask(table) + 1
    assert len(keys).bit_count() == 1


def test_the_code_fits_its_room_and_begins_where_indirect_calls_may_land(code: bytes) -> None:
    assert code.startswith(X86_64.patch.landing_pad)
    assert len(code) <= NOTIFIER_SIZE - PREAMBLE_SIZE - len(EMPTY_TABLE)
    assert BLOCK_TABLE + 8 <= BLOCK_MASK
    assert BLOCK_MASK + 8 <= BLOCK_SIZE
