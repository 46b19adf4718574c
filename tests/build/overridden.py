"""A function with overrides on an emulated CPU of either architecture, and calls of it."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from kprobes.arch.aarch64 import encode
from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch
from kprobes.arch.x86_64.arch import X86_64
from kprobes.codegen.compile import Form, compile_form, saved_reads
from kprobes.model.abi import GuestAbi
from kprobes.model.override import (
    OVERRIDE_HITS,
    OVERRIDE_MISSED,
    OVERRIDE_SIZE,
    OVERRIDE_SKIPPED,
    Override,
    OverrideCounts,
)
from kprobes.model.plan import Displaced
from kprobes.model.resolved import Resolved
from kprobes.units import U64, Addr
from tests.build import arm64, machine
from tests.build.arm64 import Arm64Machine
from tests.build.filtered import make_filtered
from tests.build.kernel import SITE, make_probe
from tests.build.machine import Loaded, Machine, random_state

AnyMachine = Machine | Arm64Machine


class Called(Struct, frozen=True, kw_only=True):
    """One call of the function.

    Attributes:
        is_skipped: whether it came back to its caller, and its code did not run.
        before, after: registers.
    """

    is_skipped: bool
    before: Mapping[str, int]
    after: Mapping[str, int]


class Isa(Struct, frozen=True, kw_only=True):
    """What differs between the two.

    Attributes:
        kept: registers that a function leaves as they were.
        given: registers of arguments.
        result: the register of what it returns.
        nop: an instruction of the function, as long as a patch.
    """

    arch: Arch
    kept: Sequence[str]
    given: Sequence[str]
    result: str
    nop: bytes


AMD64 = Isa(
    arch=X86_64,
    kept=("bx", "bp", "r12", "r13", "r14", "r15"),
    given=("di", "si", "dx", "cx", "r8", "r9"),
    result="ax",
    nop=X86_64.site.nops[0],
)
ARM64 = Isa(
    arch=AARCH64,
    kept=tuple(f"x{n}" for n in range(19, 30)),
    given=tuple(f"x{n}" for n in range(9)),
    result="x0",
    nop=encode.NOP,
)


def make_tested(isa: Isa, text: str, filter_text: str = "") -> Resolved:
    """Resolve what an override's filter reads, on a function ``f``."""
    if isa is ARM64:
        return arm64.make_probe(text, filter_text)
    return make_filtered(text, filter_text) if filter_text else make_probe(text)


class Overridden:
    """The function, its overrides, and probes at its entry.

    Attributes:
        machine: that runs it.
        words: where the first override counts.
    """

    def __init__(
        self,
        isa: Isa,
        overrides: Sequence[Override],
        *,
        probes: Sequence[Resolved] = (),
        is_patched: bool = False,
        abi: GuestAbi | None = None,
    ) -> None:
        self._isa = isa
        self.machine: AnyMachine
        if isa is ARM64:
            self.machine, kernel = Arm64Machine(abi or arm64.ABI), arm64.KERNEL
        else:
            self.machine, kernel = Machine(abi or machine.ABI), machine.KERNEL
        self.words = kernel + 0x3000
        self._start = arm64.SITE if isa is ARM64 else SITE
        self._back = self._start + 0x800
        form = Form(
            probes=tuple(probes),
            overrides=tuple(overrides),
            is_framed=True,
            is_patched=is_patched,
        )
        self._end = self._patch(form) if is_patched else self._hook(form)
        for place in (self._end, self._back):
            self.machine.cpu.add_exit(place)

    def call(self, **fixed: int) -> Called:
        """Call it once with some registers, the others at random."""
        cpu = self.machine.cpu
        if isinstance(self.machine, Machine):
            before = random_state(self.machine.random, **fixed)
            cpu.set_number(before["sp"], self._back)
        else:
            before = arm64.random_state(self.machine.random, **{"x30": self._back, **fixed})
        cpu.set_registers(before)
        pc = cpu.run(self._start)
        while pc not in (self._back, self._end):
            pc = cpu.run(self.machine.readers.run(pc))
        return Called(is_skipped=pc == self._back, before=before, after=cpu.registers())

    def counts(self, number: int = 0) -> OverrideCounts:
        """Return what an override has counted."""
        at = self.words + OVERRIDE_SIZE * number
        hits, skipped, missed = (
            self.machine.cpu.number(at + offset)
            for offset in (OVERRIDE_HITS, OVERRIDE_SKIPPED, OVERRIDE_MISSED)
        )
        return OverrideCounts(hits=hits, skipped=skipped, missed=missed)

    def _numbers(self, form: Form) -> Mapping[str, int]:
        probes = [*form.probes, *(each.probe for each in form.overrides)]
        if isinstance(self.machine, Machine):
            numbers = self.machine.numbers(probes)
        else:
            numbers = self.machine.numbers(probes, self._start)
        words = {
            f"override{n}": self.words + OVERRIDE_SIZE * each.number
            for n, each in enumerate(form.overrides)
        }
        return {**numbers, **words}

    def _body(self, form: Form) -> Addr:
        template = compile_form(self._isa.arch, self.machine.abi, form)
        place = self._put(lambda place: template.link(place, self._numbers(form)))
        if isinstance(self.machine, Machine):
            self.machine.loaded.append(Loaded(form.probes, self._start, place, place))
        else:
            self.machine.know(form.probes)
        return place

    def _put(self, link: Callable[[Addr], bytes]) -> Addr:
        return self.machine.put(link)

    def _hook(self, form: Form) -> int:
        site, body = self._isa.arch.site, self._body(form)
        probes = [*form.probes, *(each.probe for each in form.overrides)]
        reads = saved_reads(self._isa.arch, probes)
        entry = self._put(lambda place: site.entry(place, body, reads=reads, skips=True))
        preamble = site.preamble if self._isa is ARM64 else b""
        at = Addr(self._start + len(preamble))
        self.machine.cpu.write(self._start, preamble + site.branch(at, entry))
        return at + site.size

    def _patch(self, form: Form) -> int:
        patch, body, nop = self._isa.arch.patch, self._body(form), self._isa.nop
        start, stop = Addr(self._start), Addr(self._start + len(nop))
        displaced = Displaced(addr=start, code=nop, count=1, stop=stop)
        detour = self._put(lambda place: patch.detour(place, body, displaced, skips=True))
        self.machine.cpu.write(start, patch.jump(start, detour))
        return stop


def expect_skipped(isa: Isa, called: Called, value: int) -> None:
    """Check that a call came back as a function does that returned this."""
    assert called.is_skipped
    assert called.after[isa.result] == value & U64
    popped = 8 if isa is AMD64 else 0
    assert called.after["sp"] == called.before["sp"] + popped
    assert {n: called.after[n] for n in isa.kept} == {n: called.before[n] for n in isa.kept}


def expect_run(isa: Isa, called: Called) -> None:
    """Check that a call went on with all that the function is given."""
    assert not called.is_skipped
    names = [*isa.kept, *isa.given, "sp", *(["x30"] if isa is ARM64 else ["ax", "r10"])]
    assert {n: called.after[n] for n in names} == {n: called.before[n] for n in names}
