"""Trampolines that ask Python before they return."""

from kprobes.arch.x86_64 import trampoline
from kprobes.arch.x86_64.upcall import at_trampoline
from kprobes.model.upcall import SiteUpcalls
from kprobes.units import Addr
from tests.arch.x86_64.test_trampoline import BODY, END, TOP, Machine
from tests.build.text import SLOT, START

ENTRY_STUB = Addr(BODY + 0x100)
SHOWN = Addr(START + 0x20)
# mov rax, END; mov [rsp+88], rax; ret: what is pushed first is the return address' place.
PUT = bytes.fromhex("48b8" + END.to_bytes(8, "little").hex() + "4889442458 c3")


def machine_of(question: int | None) -> tuple[Machine, Addr]:
    machine = Machine("90" * 8, PUT)
    return_method = at_trampoline(
        SLOT, BODY, SiteUpcalls(entry_stub=ENTRY_STUB, before=question, after=None), SHOWN
    )
    assert return_method.code.startswith(trampoline.TRAMPOLINE_MARK)
    machine.cpu.write(SLOT, return_method.code)
    # lea rsp, [rsp+8]; ret: Python changes nothing.
    machine.cpu.write(ENTRY_STUB, bytes.fromhex("488d642408 c3"))
    return machine, return_method.copies[SHOWN]


def test_python_sees_the_stack_as_before_a_return_instruction() -> None:
    machine, copy = machine_of(7)
    machine.cpu.add_exit(ENTRY_STUB)
    machine.cpu.set_registers(machine.state)

    assert machine.cpu.run(SLOT) == ENTRY_STUB

    number, resume, caller = (machine.cpu.number(TOP - 24 + 8 * n) for n in range(3))
    assert machine.cpu.register("sp") == TOP - 24
    assert (number, resume, caller) == (7, copy, END)
    assert machine.cpu.read(copy, 1) == b"\xc3"


def test_it_returns_with_all_as_the_function_left_it() -> None:
    for question in (7, None):
        machine, _ = machine_of(question)

        after, _ = machine.run(SLOT)

        assert after == machine.state
