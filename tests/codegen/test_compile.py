"""State that the probed function gets back, and parts of the code."""

from random import Random

import pytest
from iced_x86 import Code, Decoder, FlowControl, InstructionInfoFactory, Mnemonic, RegisterExt

from kprobes.arch.x86_64.arch import X86_64
from kprobes.codegen.compile import compile_probes, needs_frame
from kprobes.model.abi import GuestAbi
from tests.build import reference
from tests.build.kernel import make_probe
from tests.build.machine import ABI, ABI_FAR, ABI_HIGH, Machine, random_state
from tests.codegen.test_fetch import DEFINITIONS, this_cpu_off_of

DEAD = {"ax", "r11", "flags"}
"""What no function expects to find at its entry."""


def _run_many(text: str, count: int, *, abi: GuestAbi = ABI) -> None:
    machine = Machine(abi)
    probe = make_probe(text, this_cpu_off=this_cpu_off_of(abi))
    loaded = machine.load([probe])
    machine.readers.has_old_quirks = True
    reference.fill(machine, Random(0))
    for n in range(count):
        random = Random(n)
        room = random.choice([1 << 15, 1 << 15, 40, 0])
        machine.set_position(0, 0, room=room)
        pointers = {name: reference.address(random) for name in ("di", "si", "dx", "cx", "bx")}
        state = random_state(random, **(pointers if n % 4 else {}))
        above = machine.cpu.read(state["sp"], -state["sp"] % 4096)

        after = machine.hit(loaded, state)

        changed = {name for name in after if after[name] != state[name]}
        assert changed <= DEAD, (n, state)
        assert machine.cpu.read(state["sp"], len(above)) == above
        assert machine.guard() == 0
        assert machine.preempt_count == 1 << 31


@pytest.mark.parametrize("text", DEFINITIONS)
def test_the_probed_function_finds_its_registers_as_they_were(text: str) -> None:
    _run_many(text, 60)


@pytest.mark.parametrize("text", DEFINITIONS[::4])
def test_registers_survive_where_our_per_cpu_words_are_far(text: str) -> None:
    _run_many(text, 20, abi=ABI_FAR)


@pytest.mark.storm
@pytest.mark.parametrize("abi", [ABI, ABI_HIGH, ABI_FAR])
@pytest.mark.parametrize("text", DEFINITIONS)
def test_registers_survive_a_storm(text: str, abi: GuestAbi) -> None:
    _run_many(text, 10_000, abi=abi)


def test_a_changed_register_does_not_go_unnoticed() -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f a=$arg1")])
    # xor ecx, ecx; ret
    machine.cpu.write(loaded.entry, bytes.fromhex("31c9c3"))
    state = random_state(machine.random)

    after = machine.hit(loaded, state)

    assert {name for name in after if after[name] != state[name]} - DEAD == {"cx"}


@pytest.mark.parametrize("text", DEFINITIONS)
def test_the_code_uses_general_registers_and_direct_branches_only(text: str) -> None:
    probe = make_probe(text)
    is_framed = needs_frame(X86_64, [probe])
    code = compile_probes(X86_64, ABI, [probe], is_framed=is_framed).code
    info = InstructionInfoFactory()

    found = list(Decoder(64, code))

    assert sum(len(instruction) for instruction in found) == len(code)
    for instruction in found:
        assert instruction.code != Code.INVALID
        assert instruction.flow_control not in (
            FlowControl.INDIRECT_BRANCH,
            FlowControl.INDIRECT_CALL,
            FlowControl.INTERRUPT,
            FlowControl.EXCEPTION,
        )
        for used in info.info(instruction).used_registers():
            number = used.register
            is_plain = RegisterExt.is_gpr(number) or RegisterExt.is_segment_register(number)
            assert is_plain, f"{instruction}"


@pytest.mark.parametrize("text", DEFINITIONS)
def test_calls_go_to_the_guest_s_readers_and_nowhere_else(text: str) -> None:
    probe = make_probe(text)
    template = compile_probes(X86_64, ABI, [probe], is_framed=True)
    calls = [item for item in Decoder(64, template.code) if item.mnemonic == Mnemonic.CALL]
    linked = {item.offset for item in template.relocations if item.symbol.startswith(_READERS)}

    assert {call.ip + 1 for call in calls} == linked
    assert bool(calls) == probe.calls_guest


_READERS = ("copy_", "string_")


def test_a_frame_is_needed_for_registers_that_no_caller_passes() -> None:
    needing = [make_probe(f"p f a={form}") for form in ("%bx", "+0(%ax)", "+0(+8(%flags)):u8")]
    plain = [make_probe(f"p f a={form}") for form in ("%di", "%sp", "%ip", "$arg7", "+0(%cs)")]

    assert [needs_frame(X86_64, [plain[0], probe]) for probe in needing] == [True] * 3
    assert [needs_frame(X86_64, [probe]) for probe in plain] == [False] * 5


def test_probes_that_differ_in_event_ids_alone_have_the_same_code() -> None:
    templates = [
        compile_probes(X86_64, ABI, [make_probe("p f a=$arg1", event_id=n)], is_framed=False)
        for n in (1, 65535)
    ]

    assert templates[0] == templates[1]
    assert make_probe("p f a=$arg1").shape == make_probe("p f a=$arg1", event_id=9).shape
    assert make_probe("p f a=$arg1").shape != make_probe("p f a=$arg2").shape
