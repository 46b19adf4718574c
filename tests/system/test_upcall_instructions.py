"""Hits that wait for Python before and after any instruction of a function in real guests."""

import re
from collections.abc import Generator

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import RefusedError
from kprobes.guest.places import places_of
from kprobes.model.plan import Strategy
from kprobes.model.upcall import WaitingVcpu
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import Addr
from tests.build.victim import settle
from tests.system.upcalls import PARENT, PATIENT, Kernel, files

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

SUITES = {"6.1": "bookworm", "7.x": "sid"}
_MAKES_RESULT = {
    "amd64": rb"\x48\x63[\xc0-\xc7]",
    "arm64": rb"[\x00\x20\x40\x60\x80\xa0\xc0\xe0][\x7c-\x7f]\x40\x93",
}
"""movslq REG, %rax; sxtw x0, REG."""
_RETURN, _JUMP, _CALL, _ON = "return", "jump", "call", ("next", "branch")


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def kernel(request: pytest.FixtureRequest, arch: str) -> Generator[Kernel]:
    options = MachineOptions(arch=arch, suite=request.param, files=files(arch), append=PATIENT)
    with kprobes.boot(options) as session:
        assert session.machine is not None
        settle(session.machine)
        yield Kernel(session)


@pytest.fixture(autouse=True)
def _the_guest_does_not_complain(request: pytest.FixtureRequest) -> Generator[None]:
    yield
    if "kernel" in request.fixturenames:
        assert request.getfixturevalue("kernel").complaints() == []


def test_after_every_instruction_python_sees_where_it_leads(kernel: Kernel) -> None:
    see_all(kernel)


@pytest.mark.arches("amd64")
def test_after_every_breakpoint_python_sees_where_it_leads(kernel: Kernel) -> None:
    kernel.session.options = replace(kernel.session.options, strategy=Strategy.BREAKPOINT)
    try:
        see_all(kernel)
    finally:
        kernel.session.options = replace(kernel.session.options, strategy=None)


def see_all(kernel: Kernel) -> None:
    """Check where each instruction leads: calls, moves, and the return, all that there is."""
    instructions = kernel.instructions(kernel.asked_name)
    site, places = kernel.dialect.site, places_of(kernel.session.driver.guest)
    nexts: dict[Addr, set[int]] = {}
    for addr in sorted(instructions):
        _see(kernel, addr, nexts)

    for addr, seen in nexts.items():
        instruction, traced = instructions[addr], places.ftrace_site(addr)
        if traced is not None:
            assert seen == {traced + site}
        elif instruction.flow in _ON:
            assert seen <= {instruction.next, instruction.target}
        elif instruction.flow == _CALL or (
            instruction.flow == _JUMP and instruction.target in instructions
        ):
            assert seen == {instruction.target}
        else:
            # To its caller, or to the thunk that returns there.
            assert not any(addr in instructions for addr in seen)
    assert len(nexts) >= 10


def _see(kernel: Kernel, addr: Addr, nexts: dict[Addr, set[int]]) -> None:
    """Have Python before and after an instruction, where that may be."""
    before: list[int] = []
    after: list[int] = []
    pre = kernel.upcall_at(addr, lambda w: before.append(w.registers["ip"]))
    post = kernel.upcall_at(addr, lambda w: after.append(w.registers["ip"]), is_after=True)
    try:
        with kernel.asked(pre, post):
            kernel.run(*PARENT)
    except RefusedError:
        return
    if before:
        # At an entry it is the tracer's site that asks.
        site = places_of(kernel.session.driver.guest).ftrace_site(addr)
        assert set(before) == {addr if site is None else site}
        assert len(before) == len(after)
        nexts[addr] = set(after)
    assert (kernel.missed(pre), kernel.missed(post)) == (0, 0)


def test_a_handler_after_a_return_can_change_the_result(kernel: Kernel) -> None:
    instructions = kernel.instructions(kernel.asked_name).items()
    ends = [addr for addr, each in instructions if each.flow == _RETURN]

    def change(waiting: WaitingVcpu) -> None:
        waiting.registers[kernel.dialect.value] = 777

    with kernel.asked(*(kernel.upcall_at(end, change, is_after=True) for end in ends)):
        found = kernel.run(*PARENT).split()[0]

    assert found == "777"


def test_an_instruction_is_skipped_whatever_a_jump_covers(kernel: Kernel, arch: str) -> None:
    check_skipped(kernel, arch, Strategy.JUMP)


@pytest.mark.arches("amd64")
def test_an_instruction_is_skipped_that_has_a_breakpoint(kernel: Kernel, arch: str) -> None:
    check_skipped(kernel, arch, Strategy.BREAKPOINT)


def check_skipped(kernel: Kernel, arch: str, strategy: Strategy) -> None:
    """Check that what makes a function's result, just before it returns, can be left out."""
    instructions = kernel.instructions(kernel.asked_name)
    made = (each for each in instructions.values() if re.match(_MAKES_RESULT[arch], each.code))
    skipped = next(made)

    def skip(waiting: WaitingVcpu) -> None:
        waiting.registers["ip"] = skipped.next
        waiting.registers[kernel.dialect.value] = 1234

    kernel.session.options = replace(kernel.session.options, strategy=strategy)
    try:
        with kernel.asked(kernel.upcall_at(skipped.addr, skip)):
            found = kernel.run(*PARENT).split()[0]
    finally:
        kernel.session.options = replace(kernel.session.options, strategy=None)

    assert found == "1234"
