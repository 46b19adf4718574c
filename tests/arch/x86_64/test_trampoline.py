"""Detours of patched instructions, run on an emulated CPU, and what may be patched."""

from random import Random

import pytest

from kprobes.arch.x86_64 import slot, trampoline
from kprobes.arch.x86_64.arch import X86_64
from kprobes.arch.x86_64.trampoline import TRAP_PATH, examine
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Displaced, PatchOptions
from kprobes.units import U64, Addr
from tests.build.cpu import GPRS, Cpu
from tests.build.text import SLOT, START, to

BODY = Addr(SLOT + 0x800)
STACK = 0xFFFF_C900_0000_0000
TOP = STACK + 0x800
END = START + 0x80
FLAGS = 0xCD5
RED = b"\xd6" * 64
WORDS = len(slot.SAVED)
# What a body may change: r11, rax, all arithmetic flags, and the stack below its own frame.
#   mov r11, -1; mov rax, -2; push 1; pop rcx (rcx is put back); cld; xor eax, eax; cmp al, 1; ret
CLOBBER = bytes.fromhex("49c7c3ffffffff 48c7c0feffffff 51 6a01 59 59 fc 83f001 3c01 c3")
INSTRUCTIONS = {
    "nops": "90 0f1f440000",
    "pushes": "55 4157 4156",
    "arithmetic on flags": "4811d8 480fc9",
    "a load from the stack": "488b442408",
    "what stores the stack pointer": "54 48892424",
    "pushed flags": "9c 8f442410",
    "a taken branch": "31c9 7406",
    "a call's worth": "48 8d 05 10 00 00 00",
}


def ways_of(code: str, at: int = 0, *, name: str = "f") -> PatchOptions:
    part = TextPart(addr=Addr(START), code=bytes.fromhex(code))
    return examine(name, (part,), TextTables(has_jump_tables=False))(Addr(START + at))


def displaced_by_jump(code: str) -> Displaced:
    found = ways_of(code).jump
    assert not isinstance(found, str), found
    return found


class Machine:
    """A CPU with a function at START, a detour at SLOT, and a body that clobbers."""

    def __init__(self, code: str, body: bytes = CLOBBER) -> None:
        self.code = bytes.fromhex(code).ljust(0x80, b"\x90")
        regions = [(START & ~0xFFF, 0x1000), (SLOT, 0x1000), (STACK, 0x1000)]
        self.cpu = Cpu(regions, [])
        self.cpu.add_exit(END)
        self.cpu.write(START, self.code)
        self.cpu.write(BODY, body)
        self.state = self._state()

    def _state(self) -> dict[str, int]:
        random = Random(3)
        state = {name: random.getrandbits(64) for name in GPRS}
        return {**state, "sp": TOP, "flags": 2 | random.getrandbits(12) & FLAGS | 1 << 9}

    def run(self, start: int) -> tuple[dict[str, int], bytes]:
        """Return the registers and the living stack at the end."""
        self.cpu.write(STACK, bytes(range(256)) * 16)
        self.cpu.set_registers(self.state)
        assert self.cpu.run(start) == END
        registers = self.cpu.registers()
        sp = registers["sp"]
        return registers, self.cpu.read(sp, STACK + 0x1000 - sp)


@pytest.mark.parametrize("code", INSTRUCTIONS.values(), ids=INSTRUCTIONS.keys())
def test_a_patched_run_leaves_all_as_the_run_itself(code: str) -> None:
    displaced = displaced_by_jump(code + "90" * 16)
    plain, patched = Machine(code), Machine(code)
    return_method = trampoline.detour(SLOT, BODY, displaced)
    assert len(return_method) <= BODY - SLOT
    patched.cpu.write(SLOT, return_method)
    patched.cpu.write(START, trampoline.jump(Addr(START), SLOT))

    assert patched.run(START) == plain.run(START)


@pytest.mark.parametrize("flags", [2, 2 | FLAGS, 2 | 1 << 9, 2 | FLAGS | 1 << 9, 0x246 | 1 << 10])
def test_a_breakpoint_s_detour_leaves_all_as_the_instruction_itself(flags: int) -> None:
    code = "4811d8" + "90" * 8
    displaced = ways_of(code).breakpoint
    assert isinstance(displaced, Displaced)
    plain, patched = Machine(code), Machine(code)
    plain.state = patched.state = {**plain.state, "flags": flags}
    patched.cpu.write(SLOT, trampoline.detour(SLOT, BODY, displaced))

    # Our callback leads here, with everything as at the breakpoint.
    assert patched.run(SLOT) == plain.run(START)


def test_the_body_finds_the_stack_as_at_an_ftrace_site() -> None:
    code = "4811d8" + "90" * 8
    displaced = ways_of(code).breakpoint
    assert isinstance(displaced, Displaced)
    # hlt's place is an exit: the body is looked at when it begins.
    machine = Machine(code)
    machine.cpu.add_exit(BODY)
    machine.cpu.write(SLOT, trampoline.detour(SLOT, BODY, displaced))
    machine.cpu.set_registers(machine.state)

    assert machine.cpu.run(SLOT) == BODY

    stack, saved = machine.cpu.register("sp"), {**machine.state}
    words = [machine.cpu.number(stack + 8 * n) for n in range(WORDS + 2)]
    assert stack + 8 * len(words) == TOP
    assert words[1 : WORDS + 1] == [saved[name] for name in slot.SAVED]
    assert SLOT < words[0] < SLOT + 64
    for name in X86_64.code.call.parameters:
        assert machine.cpu.register(name) == saved[name]


def test_nothing_above_the_stack_pointer_is_written() -> None:
    code = "4811d8" + "90" * 8
    displaced = ways_of(code).breakpoint
    assert isinstance(displaced, Displaced)
    machine = Machine(code)
    machine.cpu.write(SLOT, trampoline.detour(SLOT, BODY, displaced))
    machine.run(SLOT)

    assert all(write.addr + write.size <= TOP for write in machine.cpu.writes)


def test_what_is_displaced_is_after_the_call_and_leads_back() -> None:
    displaced = displaced_by_jump("55" + "4157" + "4156" + "90" * 8)

    return_method = trampoline.detour(SLOT, BODY, displaced)

    tail = displaced.code + bytes([slot.JMP])
    at = return_method.index(tail)
    back = at + len(displaced.code)
    assert return_method[back + 1 : back + 5].hex() == to(displaced.stop, 5, place=SLOT + back)


def test_a_detour_too_far_away_is_refused() -> None:
    lea = displaced_by_jump("488d0510000000" + "90" * 8)

    with pytest.raises((RefusedError, ValueError), match=r"too far|reached"):
        trampoline.detour(Addr(START - (1 << 33) & U64), Addr(START - (1 << 33) + 0x100 & U64), lea)


@pytest.mark.parametrize(
    ("code", "first"), [("f30f1efa 55", 4), ("55", 0), ("f30f1efb 55", 0), ("", 0)]
)
def test_the_first_instruction_is_after_what_indirect_branches_land_on(
    code: str, first: int
) -> None:
    assert trampoline.first(bytes.fromhex(code)) == first


def test_an_instruction_alone_and_a_run_from_it_are_ways() -> None:
    return_methods = ways_of("55" + "4157" + "4156" + "90c3")

    assert return_methods.is_boundary
    assert return_methods.breakpoint == Displaced(
        addr=Addr(START), code=b"\x55", count=1, stop=Addr(START + 1)
    )
    assert return_methods.jump == Displaced(
        addr=Addr(START), code=bytes.fromhex("5541574156"), count=3, stop=Addr(START + 5)
    )


def test_in_the_middle_of_an_instruction_there_is_no_way() -> None:
    return_methods = ways_of("55" + "4157" + "4156" + "90c3", at=2)

    assert not return_methods.is_boundary
    assert return_methods.breakpoint == return_methods.jump
    assert "inside the 2-byte instruction at f+0x1" in str(return_methods.jump)


def test_what_no_slot_may_run_has_no_way_but_begins_there() -> None:
    return_methods = ways_of("cf" + "90" * 8)

    assert return_methods.is_boundary
    assert "it leaves the kernel" in str(return_methods.breakpoint)
    assert return_methods.breakpoint == return_methods.jump


def test_a_jump_that_is_not_safe_leaves_the_breakpoint() -> None:
    # jmp to the second instruction.
    return_methods = ways_of("55" + "4157" + "4156" + "ebfa")

    assert isinstance(return_methods.breakpoint, Displaced)
    assert "something leads to f+0x1" in str(return_methods.jump)


@pytest.mark.parametrize("name", sorted(TRAP_PATH))
def test_on_our_trap_path_there_are_jumps_but_no_breakpoints(name: str) -> None:
    return_methods = ways_of("55" + "4157" + "4156" + "90c3", name=name)

    assert "our own breakpoints come through it" in str(return_methods.breakpoint)
    assert isinstance(return_methods.jump, Displaced)
