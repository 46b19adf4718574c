"""Every operand into its field: generated code against a reference in plain Python."""

from random import Random

import pytest
from msgspec.structs import replace

from kprobes.model.abi import MAX_DYNAMIC, MAX_STRING, GuestAbi
from kprobes.model.definition import Computed, Deref, Immediate, Operation
from kprobes.model.resolved import Resolved, can_fault
from kprobes.units import U64
from tests.build import reference
from tests.build.kernel import DATA_SYMBOL, THIS_CPU_OFF, make_probe, read
from tests.build.machine import (
    ABI,
    ABI_HIGH,
    DATA_SIZE,
    FAR,
    HIGH,
    KERNEL,
    PERCPU,
    USER,
    Machine,
    random_state,
)
from tests.build.operations import SHIFTS
from tests.build.records import records

DEFINITIONS = [
    "p f",
    "p f a=$arg1:u8 b=$arg2:u16 c=$arg3:u32 d=$arg4:u64 e=$arg5:s8 f=$arg6:s16",
    "p f a=$arg7:x8 b=$arg8:x16 c=$arg1:s32 d=$arg2:s64 e=$arg3:x32 f=$arg4:x64 g=$arg6",
    "p f a=$stack b=$stack0 c=$stack3:u16 d=$stack200 e=$stack2047 f=$stack2048",
    "p f a=\\0x1122334455667788:u32 b=\\200:u8 c=\\0xffffffffffffffff d=$comm e=$arg1:u8",
    "p f a=%di b=%si c=%dx d=%cx e=%r8 f=%r9 g=%sp h=%ip i=%cs j=%ss k=%orig_ax",
    "p f a=%r15 b=%r14 c=%r13 d=%r12 e=%r11 f=%r10 g=%bp h=%bx i=%ax j=%flags k=%di l=%sp",
    "p f a=+0($arg1):u8 b=+1($arg2):s16 c=-4($arg3):x32 d=+8($arg4) e=$arg5 f=%ip",
    "p f a=+u0($arg1):u8 b=+u1($arg2):s16 c=-u4($arg3):x32 d=+u8($arg4)",
    "p f a=+0(+8($arg1)) b=+u16(+0($arg2)):u16 c=+0(+u0(-8($arg3))):u8 d=+0(%bx) e=+8($stack)",
    "p f a=@0xffff888003000010:u16 b=+0(@0xffff888003000018) c=@0x1000 d=@data",
    "p f s=+0($arg1):string",
    "p f u=+0($arg1):ustring n=$arg2:u8 s=+0(+0($arg3)):string v=+u0($arg4):string c=$comm",
    "p f n=+0($arg1) s=+0($arg2):string t=+0($arg3):string m=+0($arg4):u16 b=%r12",
    "p f a=+0($arg1):u8[3] b=+4($arg2):x16[5] c=+0(+8($arg3)):s32[2] d=+0($arg1):u64[64] e=$arg4",
    "p f a=+0($arg1):b3@2/8 b=$arg2:b5@11/16 c=+0(+0($arg3)):b31@1/32 d=+0($arg1):b63@0/64 e=%di",
    "p f a=+0($arg1):b3@5/8[7] b=+0($arg2):b9@3/16[2] c=+0($arg3):b1@31/32[3] d=\\0xabcd:b4@8/16",
    "p f a=$arg1:char b=+0($arg2):char[6] c=$arg3:symbol d=+8($arg1):symbol[2] e=+0($arg2):symstr",
    "p f s=+0($arg1):string[3] n=$arg2 t=+8($arg3):ustring[2] u=+u0($arg1):string[1] m=+0($arg2)",
    "p f s=+0(+0($arg1)):string[4] t=\\0xffff888003000010:string u=+0($arg2):string e=+0($arg3):u8",
    'p f a=$current b=$current:u32 c=+8($current) d=\\"text" e=+0(+0($current)):string',
    "p f a=this_cpu_ptr(@data) b=this_cpu_read(@data):u16 c=this_cpu_ptr($arg1)",
    "p f a=+0(this_cpu_ptr(%si)) b=+8(this_cpu_ptr(@data)):u8[5] c=+0(this_cpu_ptr(@data)):string",
    "p f a=this_cpu_ptr(+0($arg1)):x32 b=this_cpu_read(+8($arg2)) c=+0(this_cpu_read(%dx)):string",
]


def this_cpu_off_of(abi: GuestAbi) -> int:
    """Return where a kernel of such addresses has its ``this_cpu_off``."""
    return THIS_CPU_OFF + (HIGH if abi.task.current >= HIGH else 0)


def _check(abi: GuestAbi, text: str, count: int) -> None:
    this_cpu_off = this_cpu_off_of(abi)
    _check_probe(abi, make_probe(text, this_cpu_off=this_cpu_off), count)


def _check_probe(abi: GuestAbi, probe: Resolved, count: int) -> None:
    machine = Machine(abi)
    this_cpu_off = this_cpu_off_of(abi)
    loaded = machine.load([probe])
    for n in range(count):
        random = Random(n)
        if n % 20 == 0:
            reference.fill(machine, random)
        # So that the CPU's copy of ``data`` is where something can be read, mostly.
        away = reference.address(random) - DATA_SYMBOL
        machine.cpu.set_number(machine.percpu(this_cpu_off), away & U64)
        machine.set_position(0, 0)
        pointers = {name: reference.address(random) for name in ("di", "si", "dx", "cx", "bx")}
        state = random_state(random, **(pointers if n % 4 else {}))
        machine.readers.has_old_quirks = False

        machine.hit(loaded, state)

        (found,) = records(machine, 0)
        assert found.values == reference.values(machine, probe, state), (n, state)


@pytest.mark.parametrize("text", DEFINITIONS)
def test_every_field_is_what_the_guest_has(text: str) -> None:
    _check(ABI, text, 25)


@pytest.mark.parametrize("text", [DEFINITIONS[6], DEFINITIONS[9], DEFINITIONS[12], DEFINITIONS[-2]])
def test_every_field_is_right_where_per_cpu_addresses_are_high(text: str) -> None:
    _check(ABI_HIGH, text, 10)


@pytest.mark.storm
@pytest.mark.parametrize("text", DEFINITIONS)
def test_every_field_is_right_in_many_states(text: str) -> None:
    _check(ABI, text, 5_000)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("words", ["%di %si", "+0(%di) \\3", "%bx \\17", "+8(+0(%di)) +0(%si)"])
def test_what_is_computed_is_what_it_is_made_of(operation: Operation, words: str) -> None:
    left, right = (arg.fetch for arg in read(f"p f {words}").args)
    definition = read("p f made=%di:u64 twice=%di:s16 at=%di:u8")
    span = definition.place.span
    if operation in SHIFTS:
        right = right if isinstance(right, Immediate) else Immediate(value=63, span=span)
    made = Computed(operation=operation, left=left, right=right, span=span)
    twice = Computed(operation=Operation.ADD, left=made, right=made, span=span)
    fetches = made, twice, Deref(base=made, offset=4, is_user=False, span=span)
    args = tuple(replace(a, fetch=f) for a, f in zip(definition.args, fetches, strict=True))
    probe = make_probe(replace(definition, args=args))

    assert can_fault(probe.fetches[0].operand) == ("(" in words)
    _check_probe(ABI, probe, 12)


def test_a_stack_slot_on_a_page_that_is_not_there_is_0_and_no_fault() -> None:
    # As on an interrupt's stack, which need not be aligned to its size.
    machine = Machine()
    page = PERCPU[0] + FAR
    stack = page + 0x1000 - 24
    machine.cpu.write(stack, b"".join(bytes([n]) * 8 for n in (1, 2, 3)))
    loaded = machine.load(
        [make_probe("p f a=$stack0 b=$stack2 c=$stack3 d=$stack500 e=$stack2047")]
    )

    machine.hit(loaded, random_state(machine.random, sp=stack))

    (found,) = records(machine, 0)
    assert found.values == (0x0101010101010101, 0x0303030303030303, 0, 0, 0)


@pytest.mark.parametrize("word", ["string", "ustring"])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 4094, 4095, 4096, 5000])
def test_strings_end_at_their_nul_or_at_the_longest(word: str, length: int) -> None:
    machine = Machine()
    loaded = machine.load([make_probe(f"p f s=+0($arg1):{word}")])
    place = USER if word == "ustring" else KERNEL
    machine.cpu.write(place, b"x" * length + b"\0")

    machine.hit(loaded, random_state(machine.random, di=place))

    (found,) = records(machine, 0)
    assert found.values == (b"x" * min(length, MAX_STRING - 1) + b"\0",)


def test_a_string_that_runs_into_unmapped_memory_is_a_fault() -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f s=+0($arg1):string n=$arg2")])
    machine.cpu.write(KERNEL, b"x" * DATA_SIZE)
    end = KERNEL + DATA_SIZE

    machine.hit(loaded, random_state(machine.random, di=end - 100, si=7))

    (found,) = records(machine, 0)
    assert found.values == (None, 7)
    assert found.size == loaded.probes[0].layout.size


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_readers_that_write_before_a_faulted_string_harm_no_field(offset: int) -> None:
    machine = Machine()
    text = "p f n=$arg2 s=+0($arg1):string m=$arg2:u32 t=+0($arg1):string l=$arg2:u16"
    loaded = machine.load([make_probe(text)])
    machine.cpu.write(KERNEL, b"x" * DATA_SIZE)
    machine.readers.has_old_quirks = True
    end = KERNEL + DATA_SIZE

    machine.hit(loaded, random_state(machine.random, di=end - offset, si=(1 << 64) - 1))

    (found,) = records(machine, 0)
    assert found.values == ((1 << 64) - 1, None, (1 << 32) - 1, None, 0xFFFF)


def test_an_empty_user_string_of_old_readers_is_a_fault_as_in_the_kernel_itself() -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f s=+0($arg1):ustring")])
    machine.cpu.write(USER, b"\0")
    machine.readers.has_old_quirks = True

    machine.hit(loaded, random_state(machine.random, di=USER))

    (found,) = records(machine, 0)
    assert found.values == (None,)


def test_many_long_strings_stay_within_the_bytes_that_were_reserved() -> None:
    machine = Machine()
    words = " ".join(f"s{n}=+0($arg1):string" for n in range(7))
    loaded = machine.load([make_probe(f"p f {words} n=$arg2")])
    machine.cpu.write(KERNEL, b"x" * DATA_SIZE)
    room = loaded.probes[0].layout.size + MAX_DYNAMIC
    machine.set_position(0, 0, room=room)

    machine.hit(loaded, random_state(machine.random, di=KERNEL, si=7))

    (found,) = records(machine, 0)
    ring = machine.ring(0)
    written = [w.addr + w.size for w in machine.cpu.writes if ring <= w.addr < machine.ring(1)]
    assert max(written) <= ring + room
    assert found.size <= room
    whole = b"x" * (MAX_STRING - 1) + b"\0"
    assert found.values == (*[whole] * 4, None, None, None, 7)


def test_a_fault_is_told_by_its_bit_and_a_zero() -> None:
    machine = Machine()
    loads = " ".join(f"a{n}=+0($arg{1 + n % 2}):u32" for n in range(70))
    loaded = machine.load([make_probe(f"p f {loads}")])
    machine.cpu.write(KERNEL, b"\x11" * 4)

    machine.hit(loaded, random_state(machine.random, di=KERNEL, si=8))

    (found,) = records(machine, 0)
    layout = loaded.probes[0].layout
    assert found.values == (0x11111111, None) * 35
    stored = [machine.cpu.number(machine.ring(0) + f.offset, 4) for f in layout.fields]
    assert stored == [0x11111111, 0] * 35


@pytest.mark.parametrize("addr", [0, 0xFFF, 0x7FFF_FFFF_EFFF, USER])
def test_a_low_address_is_read_as_user_memory_whatever_was_asked(addr: int) -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f a=+0($arg1):u8 s=+0($arg1):string")])

    machine.hit(loaded, random_state(machine.random, di=addr))

    assert [name for name, _, _ in machine.readers.calls] == ["copy_user", "string_user"]
