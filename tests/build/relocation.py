"""Instructions of a real kernel's text, in place and in their slots, side by side."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from iced_x86 import Code, Decoder, Mnemonic

from kprobes.arch.x86_64.decode import decode_function, decode_one
from kprobes.arch.x86_64.insn import Instruction
from kprobes.arch.x86_64.slot import slot
from kprobes.arch.x86_64.verdict import SlotAction, insn_verdict, jump_run
from kprobes.errors import RefusedError
from kprobes.image.file import KernelImage, kernel_from_image, read_image
from kprobes.image.init_tables import read_image_tables
from kprobes.image.tables import read_function
from kprobes.model.kernel import Kernel, TextPart
from kprobes.transport.debian import kernel_image
from kprobes.units import Addr
from tests.build.emulator import REPEATS, SLOT, Emulator, Outcome, State, random_state

# Two runs of these never see the same: a clock, or chance.
_CHANCE = frozenset({Mnemonic.RDTSC, Mnemonic.RDTSCP, Mnemonic.RDRAND, Mnemonic.RDSEED})
# These change how the emulated CPU itself runs.
_CONTROL = frozenset({Mnemonic.LGDT, Mnemonic.LIDT, Mnemonic.LTR, Mnemonic.LLDT, Mnemonic.LMSW})
_TO_CONTROL = frozenset({Code.MOV_CR_R64, Code.MOV_DR_R64})
_STATES = 64
_TRIES = 8
"""States to begin in until one raises no fault."""
_FORMS: Mapping[int, str] = {v: k for k, v in vars(Code).items() if k.isupper() and v is not None}


@dataclass
class Compared:
    """What came of it, each form by iced's name.

    Attributes:
        executed: ran to its end in both places.
        faulted: raised the same fault in both: by chance, or as Unicorn does not know it.
        unexecuted: was not run, as the emulated CPU would not have been the same again.
        refused: by verdict of ours.
        differences: what should not be.
    """

    executed: Counter[str] = field(default_factory=Counter[str])
    faulted: Counter[str] = field(default_factory=Counter[str])
    unexecuted: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    differences: list[str] = field(default_factory=list[str])

    @property
    def checked_by_shape(self) -> list[str]:
        """Forms that never ran to their end: only their slots' bytes were looked at."""
        return sorted((set(self.faulted) | set(self.unexecuted)) - set(self.executed))


def compare(suite: str, *, count: int, per_form: int, seed: int = 1) -> Compared:
    """Compare a sample of a Debian kernel's instructions, every form that occurs among them."""
    image, kernel = kernel_of(suite)
    rng = random.Random(seed)
    emulator = Emulator(*kernel.text, _states(rng))
    compared = Compared()
    for addr, code in sample(image, kernel, count=count, per_form=per_form, rng=rng):
        _compare_one(emulator, rng, (addr, code), compared)
    return compared


def _states(rng: random.Random) -> list[State]:
    return [random_state(rng, is_short=i % 2 == 0) for i in range(_STATES)]


def compare_runs(suite: str, *, functions: int, seed: int = 1) -> Compared:
    """Compare runs that one jump may replace with their detours, forms left aside."""
    image, kernel = kernel_of(suite)
    rng = random.Random(seed)
    tables = read_image_tables(image, kernel)
    emulator = Emulator(*kernel.text, _states(rng))
    compared = Compared()
    for site in rng.sample(sorted(tables.ftrace), functions):
        function = decode_function(*read_function(image, kernel, site), tables)
        for addr in sorted(function.instructions.keys() - function.targets):
            try:
                run = jump_run(function, addr, tables)
            except RefusedError:
                compared.refused["run"] += 1
                continue
            if not all(REPEATS.isdisjoint(each.code[:2]) for each in run.instructions):
                # May take any number of steps, and is compared alone.
                compared.unexecuted["run"] += 1
                continue
            code = b"".join(each.code for each in run.instructions)
            here, there = emulator.run(
                (addr, code), run.detour(Addr(SLOT)), state=rng.randrange(_STATES), is_one=False
            )
            _note(compared, function.place(addr), (here, there))
    return compared


def _note(compared: Compared, place: str, outcomes: tuple[Outcome, Outcome]) -> None:
    here, there = outcomes
    if here.fault and there.fault:
        compared.faulted["run"] += 1
    elif here == there:
        compared.executed["run"] += 1
    else:
        compared.differences.append(f"{place}: next {here.next:#x} and {there.next:#x}")


@cache
def kernel_of(suite: str) -> tuple[KernelImage, Kernel]:
    """Return a Debian kernel as its file holds it."""
    image = read_image(kernel_image(suite=suite))
    return image, kernel_from_image(image)


def sample(
    image: KernelImage, kernel: Kernel, *, count: int, per_form: int, rng: random.Random
) -> list[tuple[int, bytes]]:
    """Return instructions, as (address, bytes): some of every form, then any."""
    starts = sorted({s.addr for s in kernel.symbols.glob("*") if s.is_text and s.size})
    inside = [addr for addr in starts if kernel.text[0] <= addr < kernel.text[1]]
    found: list[tuple[int, int, int]] = []
    for start, stop in zip(inside, [*inside[1:], kernel.text[1]], strict=True):
        decoder = Decoder(64, image.read(start, stop - start), ip=start)
        found += [(i.ip, i.len, i.code) for i in decoder if not i.is_invalid]
    rng.shuffle(found)
    taken: Counter[int] = Counter()
    chosen: list[tuple[int, int, int]] = []
    rest: list[tuple[int, int, int]] = []
    for each in found:
        taken[each[2]] += 1
        if taken[each[2]] <= per_form:
            chosen.append(each)
        elif each[2] != Code.INT3:
            rest.append(each)
    chosen += rest[: max(count - len(chosen), 0)]
    return [(addr, image.read(addr, size)) for addr, size, _ in chosen]


def _compare_one(
    emulator: Emulator, rng: random.Random, found: tuple[int, bytes], compared: Compared
) -> None:
    addr, code = found
    form = _FORMS[decode_one(code, addr).code]
    # A nop after it, so that sti does not lean on it.
    function = decode_function("sampled", [TextPart(addr=Addr(addr), code=code + b"\x90")])
    slot_verdict = insn_verdict(function, addr)
    instruction = function.instructions[addr]
    if slot_verdict.is_refused:
        compared.refused[form] += 1
        return
    copy = slot(instruction, Addr(SLOT))
    if slot_verdict.verdict is not SlotAction.EMULATE and not _has_shape(instruction, copy):
        compared.differences.append(f"{form} {code.hex()}: {copy.hex()}")
    if instruction.mnemonic in _CHANCE | _CONTROL or decode_one(code, addr).code in _TO_CONTROL:
        compared.unexecuted[form] += 1
        return
    for _ in range(_TRIES):
        here, there = emulator.run((addr, code), copy, state=_state(code, rng))
        if not here.fault or not there.fault:
            break
    else:
        compared.faulted[form] += 1
        return
    if here == there:
        compared.executed[form] += 1
    else:
        compared.differences.append(_difference(form, addr, code, copy, (here, there)))


def _state(code: bytes, rng: random.Random) -> int:
    return rng.randrange(_STATES) & (~0 if REPEATS.isdisjoint(code[:2]) else ~1)


def _has_shape(instruction: Instruction, copy: bytes) -> bool:
    # Read back: the same form with the same operands, wherever they count from.
    here, there = decode_one(instruction.code, instruction.addr), decode_one(copy, SLOT)
    if instruction.target is not None:
        is_same = there.near_branch_target == here.near_branch_target
        return is_same and there.mnemonic == here.mnemonic
    same = [here.code, here.op_count, here.memory_displacement, here.memory_base]
    same += [here.op_kind(i) for i in range(here.op_count)]
    size = len(instruction.code)
    changed = sum(a != b for a, b in zip(instruction.code, copy[:size], strict=True))
    found = [there.code, there.op_count, there.memory_displacement, there.memory_base]
    found += [there.op_kind(i) for i in range(there.op_count)]
    return same == found and changed <= (4 if here.is_ip_rel_memory_operand else 0)


def _difference(form: str, addr: int, code: bytes, copy: bytes, outcomes: Sequence[Outcome]) -> str:
    shown = [f"next {o.next:#x} fault {o.fault!r}" for o in outcomes]
    pairs = zip(outcomes[0].registers, outcomes[1].registers, strict=True)
    changed = [i for i, (a, b) in enumerate(pairs) if a != b]
    is_same = outcomes[0].data == outcomes[1].data
    return f"{form} {addr:#x} {code.hex()} {copy.hex()}: {shown} registers {changed} {is_same}"
