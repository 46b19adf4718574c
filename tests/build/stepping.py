"""Real functions single-stepped on an emulated CPU under random inputs: by which exits they leave.

Nothing is told to the CPU that the exit finder has found: control is followed as it goes. What a
function calls is skipped, with random results; flags change at random between instructions, so
that all sides of branches are seen.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from iced_x86 import FlowControl, Register

from kprobes.arch.x86_64.cfg import find_exits
from kprobes.arch.x86_64.decode import decode_one
from kprobes.errors import RefusedError
from kprobes.image.init_tables import read_image_tables
from kprobes.image.tables import read_function
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Exits, ReturnMethod
from tests.build.emulator import FLAGS, POINTER, Emulator, random_state
from tests.build.relocation import kernel_of

_STATES = 16
_WINDOW, _PAGE = 16, 4096
_LONGEST = 15
_STACK = 1 << 16
_CALLER = POINTER + 0x1234_5678
"""Where the function's caller is: no text."""
_CLOBBERED = ("RAX", "RCX", "RDX", "RSI", "RDI", "R8", "R9", "R10", "R11")


@dataclass
class Stepped:
    """What came of it.

    Attributes:
        functions: that were stepped.
        left: traces that left by an exit, by its kind.
        ended: traces that did not, by how they ended.
        seen, listed: exits that were taken, and all of the functions stepped.
        surprises: what should not be.
    """

    functions: int = 0
    left: Counter[str] = field(default_factory=Counter[str])
    ended: Counter[str] = field(default_factory=Counter[str])
    seen: int = 0
    listed: int = 0
    surprises: list[str] = field(default_factory=list[str])


def step_functions(
    suite: str, *, functions: int, traces: int, steps: int, seed: int = 1
) -> Stepped:
    """Step functions of a Debian kernel that are proven to leave by known exits only."""
    image, kernel = kernel_of(suite)
    rng = random.Random(seed)
    tables = read_image_tables(image, kernel)
    states = [random_state(rng, is_short=True) for _ in range(_STATES)]
    emulator = Emulator(*kernel.text, states)
    found = Stepped()
    sites, bugs = sorted(tables.ftrace), _bugs(suite)
    while found.functions < functions:
        try:
            name, parts = read_function(image, kernel, rng.choice(sites))
        except RefusedError:
            continue
        exits = find_exits(name, parts, tables)
        if exits.return_method in (ReturnMethod.RETINSN, ReturnMethod.TAIL) and _fits(parts):
            stepper = _Stepper(emulator, parts, exits, (tables, bugs), rng)
            stepper.step_through(name, traces, steps, found)
    return found


def _bugs(suite: str) -> frozenset[int]:
    # struct bug_entry { int bug_addr_disp, ...; unsigned short ..., flags; }: the ud2 of a BUG,
    # after which nothing runs, has no BUGFLAG_WARNING.
    image, kernel = kernel_of(suite)
    start, stop = (kernel.symbols.named(f"__{edge}___bug_table").addr for edge in ("start", "stop"))
    assert kernel.types is not None
    size, flags = kernel.types.size("bug_entry"), kernel.types.offset("bug_entry", "flags")
    data = image.read(start, stop - start)
    return frozenset(
        start + i + int.from_bytes(data[i : i + 4], "little", signed=True)
        for i in range(0, len(data), size)
        if not data[i + flags] & 1
    )


def _fits(parts: Sequence[TextPart]) -> bool:
    # The emulated text is 16 pages, again and again.
    pages = [page for p in parts for page in range(p.addr // _PAGE, (p.stop - 1) // _PAGE + 1)]
    return len({page % _WINDOW for page in pages}) == len(pages) == len(set(pages))


class _Stepper:
    def __init__(
        self,
        emulator: Emulator,
        parts: Sequence[TextPart],
        exits: Exits,
        known: tuple[TextTables, frozenset[int]],
        rng: random.Random,
    ) -> None:
        self._cpu = emulator
        self._parts = parts
        self._exits = {int(e.addr): e for e in exits.exits}
        self._ends = exits.noreturn_sites
        self._tables, self._bugs = known
        self._rng = rng
        self._top = 0

    def step_through(self, name: str, traces: int, steps: int, found: Stepped) -> None:
        for part in self._parts:
            self._cpu.place(part.addr, part.code)
        seen = set[int]()
        for _ in range(traces):
            self._trace(name, steps, found, seen)
        found.functions += 1
        found.seen += len(seen)
        found.listed += len(self._exits)

    def _trace(self, name: str, steps: int, found: Stepped, seen: set[int]) -> None:
        self._top = self._cpu.begin(self._rng.randrange(_STATES), _CALLER.to_bytes(8, "little"))
        at = int(self._parts[0].addr)
        for _ in range(steps):
            sp = self._cpu.value("RSP")
            goal, fault = self._one(at)
            if fault:
                found.ended["fault"] += 1
                return
            if goal is None:
                found.ended["end"] += 1
                return
            if not self._is_inside(goal) or (goal == self._parts[0].addr and sp == self._top):
                self._leave(f"{name} {at:#x}", (at, goal, sp), found, seen)
                return
            at = goal
        found.ended["steps"] += 1

    def _one(self, at: int) -> tuple[int | None, str]:
        # Where control goes on, None behind what never returns.
        label = self._tables.jump_labels.get(at)
        if label is not None:
            return self._rng.choice((label, at + decode_one(self._bytes(at), at).len)), ""
        if self._rng.random() < 0.5:
            self._cpu.set("RFLAGS", self._rng.getrandbits(12) & FLAGS & ~0x400 | 2)
        code = self._bytes(at)
        if code.startswith(b"\x0f\x0b"):
            return (None if at in self._bugs or at in self._ends else at + 2), ""
        sp = self._cpu.value("RSP")
        goal, fault = self._cpu.step(at)
        if fault:
            return self._repaired(at, code, fault)
        if self._cpu.value("RSP") == sp - 8 and at < self._cpu.on_stack(sp - 8) <= at + _LONGEST:
            pushed = self._cpu.on_stack(sp - 8)
            # A push of where an iretq goes is none.
            is_call = decode_one(code, at).flow_control != FlowControl.NEXT
            if is_call and goal != pushed:
                return self._called(at, pushed, sp), ""
        if goal == at:
            self._cpu.set("RCX", 1)
        return self._annexed(goal), ""

    def _repaired(self, at: int, code: bytes, fault: str) -> tuple[int | None, str]:
        # As the exception table has it, or as if a wild pointer had been a good one.
        fixup = self._tables.exceptions.get(at)
        decoded = decode_one(code, at)
        if fixup is not None:
            return self._annexed(fixup), ""
        is_skipped = decoded.memory_base != Register.RSP and not decoded.stack_pointer_increment
        if decoded.flow_control == FlowControl.NEXT and is_skipped:
            return at + decoded.len, ""
        return at, fault

    def _called(self, at: int, back: int, sp: int) -> int | None:
        if at in self._ends:
            return None
        for name in _CLOBBERED:
            value = self._rng.choice((0, 1, POINTER | self._rng.getrandbits(40), 2**64 - 5))
            self._cpu.set(name, value)
        self._cpu.set("RSP", sp)
        return back

    def _annexed(self, goal: int) -> int:
        annex = self._tables.annexes.get(goal)
        if annex is None or self._is_inside(goal):
            return goal
        targets, at = list[int](), 0
        while True:
            decoded = decode_one(annex.code[at:], annex.addr + at)
            at += decoded.len
            if decoded.near_branch_target:
                targets.append(decoded.near_branch_target)
            if decoded.is_jmp_short_or_near:
                return self._rng.choice(targets)

    def _leave(
        self, place: str, step: tuple[int, int, int], found: Stepped, seen: set[int]
    ) -> None:
        at, goal, sp = step
        listed = self._exits.get(at)
        if listed is None:
            found.surprises.append(f"{place} goes to {goal:#x} by no exit that is listed")
        elif abs(self._top - sp) > _STACK:
            # A loop whose end was missed has overwritten the saved stack pointer.
            found.ended["overwritten"] += 1
        elif sp != self._top:
            found.surprises.append(f"{place} is an exit with {self._top - sp} bytes on the stack")
        elif listed.target is not None and listed.target != goal:
            found.surprises.append(f"{place} goes to {goal:#x}, not to {listed.target:#x}")
        else:
            seen.add(at)
            found.left[listed.kind] += 1

    def _is_inside(self, addr: int) -> bool:
        return any(part.addr <= addr < part.stop for part in self._parts)

    def _bytes(self, at: int) -> bytes:
        part = next(part for part in self._parts if part.addr <= at < part.stop)
        return part.code[at - part.addr :][:_LONGEST]
