"""Text that the kernel's own kprobes have changed is judged as it was compiled."""

import pytest
from msgspec.structs import replace

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import RefusedError
from kprobes.guest.guest import PageCache
from kprobes.guest.text import CleanText, Instructions, NoBoundaryError, Prover, Text
from kprobes.guest.tracers import GuestProbe
from kprobes.model.kernel import TextTables
from kprobes.model.plan import ExitKind, Patch, Strategy
from kprobes.plan.strategy import Wish
from kprobes.units import Addr
from tests.build.armed_sites import SparseMemory
from tests.build.kernel import SITE, make_kernel, symbol

DETOUR = Addr(SITE + 0x4000_0000)
# push r15; push r14; push r13; mov rsi, rbx; xor eax, eax; pop r13; pop r14; pop r15; ret
X86_CODE = bytes.fromhex("4157 4156 4155 4889de 31c0 415d 415e 415f c3")
X86_STARTS = {0, 2, 4, 6, 9, 11, 13, 15, 17}
JUMP = X86_64.patch.jump(Addr(SITE), DETOUR)
# mov x1, x0; mov x0, #1; b f+12; ret
ARM64_CODE = bytes.fromhex("e10300aa 200080d2 01000014 c0035fd6")


class Probes:
    """The kernel's own, as given. Implements ``OwnProbes``."""

    def __init__(self, *probes: GuestProbe, missing: str = "") -> None:
        self.probes = probes
        self._missing = missing

    def read(self) -> tuple[GuestProbe, ...]:
        return self.probes

    def missing(self) -> str:
        return self._missing


def native(arch: Arch, code: bytes, at: int, *, detour: Addr | None = None) -> GuestProbe:
    size = len(arch.patch.breakpoint)
    return GuestProbe(
        addr=Addr(SITE + at),
        opcode=code[at : at + size],
        handlers=("event nat",),
        is_ftrace=False,
        is_disabled=False,
        slot=None,
        detour=detour,
        copied=code[at + size : at + 5] if detour else b"",
        is_optimised=detour is not None,
        may_be=detour is not None,
    )


def patched(code: bytes, at: int, new: bytes) -> bytes:
    return code[:at] + new + code[at + len(new) :]


def text_of(arch: Arch, code: bytes, probes: Probes | None = None) -> Text:
    functions = [symbol("f", SITE, size=len(code)), symbol("register_kprobe", SITE + 0x100)]
    kernel = replace(make_kernel(functions), arch=arch.name)
    return Text(
        kernel=kernel,
        open_memory=lambda: SparseMemory({SITE: code + bytes(64)}),
        read_tables=TextTables,
        probes=probes or Probes(),
    )


def answer(arch: Arch, text: Text, at: int) -> str:
    """Return "yes", "no boundary" or why a place is refused."""
    try:
        Instructions(text, arch.patch).site(Addr(SITE + at), Wish())
    except NoBoundaryError:
        return "no boundary"
    except RefusedError as error:
        return str(error)
    return "yes"


def test_pages_that_were_read_as_they_are_are_not_taken_for_the_compiled_text() -> None:
    live = SparseMemory({SITE: patched(X86_CODE, 0, JUMP).ljust(4096, b"\xcc")})
    probes = Probes(native(X86_64, X86_CODE, 0, detour=DETOUR))
    text = replace(text_of(X86_64, X86_CODE, probes), open_memory=lambda: PageCache(live))
    instructions = Instructions(text, X86_64.patch)
    assert instructions.memory.read(SITE, len(JUMP)) == JUMP

    # The guest takes its probe away before the first place is judged.
    live.pieces[SITE], probes.probes = X86_CODE.ljust(4096, b"\xcc"), ()

    with pytest.raises(NoBoundaryError):
        instructions.site(Addr(SITE + 5), Wish())
    assert instructions.site(Addr(SITE + 4), Wish()).old == X86_CODE[4:9]


@pytest.mark.parametrize("at", sorted(X86_STARTS - {15, 17}))
def test_every_place_beside_the_guests_optimised_kprobe_is_judged_as_without_it(at: int) -> None:
    jump = X86_64.patch.jump(Addr(SITE + at), DETOUR)
    probe = native(X86_64, X86_CODE, at, detour=DETOUR)
    now = text_of(X86_64, patched(X86_CODE, at, jump), Probes(probe))

    found = {n: answer(X86_64, now, n) for n in range(len(X86_CODE))}

    plain = {n: answer(X86_64, text_of(X86_64, X86_CODE), n) for n in range(len(X86_CODE))}
    assert {n for n, said in plain.items() if said == "yes"} == X86_STARTS
    covered = X86_STARTS & set(range(at, at + 5))
    assert {n: said for n, said in found.items() if n not in covered} == {
        n: said for n, said in plain.items() if n not in covered
    }
    for n in covered:
        assert "under the guest's own optimised kprobe at f" in found[n]


@pytest.mark.parametrize(
    ("arch", "code", "at"),
    [(X86_64, X86_CODE, at) for at in sorted(X86_STARTS)]
    + [(AARCH64, ARM64_CODE, at) for at in range(0, 16, 4)],
)
def test_a_breakpoint_of_the_guests_own_hides_nothing_but_its_own_place(
    arch: Arch, code: bytes, at: int
) -> None:
    now = patched(code, at, arch.patch.breakpoint)
    text = text_of(arch, now, Probes(native(arch, code, at)))

    found = {n: answer(arch, text, n) for n in range(len(code))}

    plain = {n: answer(arch, text_of(arch, code), n) for n in range(len(code))}
    assert "the guest's own kprobe is there at f" in found.pop(at)
    assert plain.pop(at) == "yes"
    assert found == plain


def test_no_jump_of_ours_covers_the_guests_own_kprobe() -> None:
    now = patched(X86_CODE, 4, b"\xcc")
    text = text_of(X86_64, now, Probes(native(X86_64, X86_CODE, 4)))

    site = Instructions(text, X86_64.patch).site(Addr(SITE + 2), Wish())

    assert site.strategy == "breakpoint"
    assert "f+0x4: the guest's own kprobe is there at f+0x4 (event nat)" in site.why


def test_what_is_put_back_is_the_kernels_own_though_a_kprobe_came_meanwhile() -> None:
    probes, jump = Probes(), X86_64.patch.jump(Addr(SITE + 4), DETOUR)
    memory = SparseMemory({SITE: X86_CODE + bytes(64)})
    text = replace(text_of(X86_64, X86_CODE, probes), open_memory=lambda: memory)
    instructions, wish = Instructions(text, X86_64.patch), Wish(strategy=Strategy.BREAKPOINT)
    instructions.site(Addr(SITE), wish)
    probes.probes = (native(X86_64, X86_CODE, 4, detour=DETOUR),)
    memory.pieces[SITE] = patched(X86_CODE, 4, jump) + bytes(64)

    site = instructions.site(Addr(SITE + 6), wish)

    # Arming finds something else there, and writes nothing.
    assert site.old == X86_CODE[6:9]


def test_one_that_the_kernel_may_optimise_any_time_is_given_room_for_it() -> None:
    probe = replace(native(X86_64, X86_CODE, 4, detour=DETOUR), is_optimised=False, copied=b"")
    now = patched(X86_CODE, 4, b"\xcc")

    may, not_yet = (
        text_of(X86_64, now, Probes(replace(probe, may_be=may_be))) for may_be in (True, False)
    )

    assert "may optimise its own kprobe at f+0x4" in answer(X86_64, may, 6)
    assert answer(X86_64, not_yet, 6) == "yes"


@pytest.mark.parametrize(
    ("arch", "code", "at", "new", "kinds"),
    [
        (X86_64, X86_CODE, 17, b"\xcc", ["return"]),
        (X86_64, X86_CODE, 2, b"", ["return"]),
        (AARCH64, ARM64_CODE, 12, AARCH64.patch.breakpoint, ["return"]),
        (AARCH64, ARM64_CODE, 8, AARCH64.patch.breakpoint, ["return"]),
    ],
)
def test_ways_out_are_those_that_were_compiled(
    arch: Arch, code: bytes, at: int, new: bytes, kinds: list[str]
) -> None:
    detour = None if new else DETOUR
    new = new or arch.patch.jump(Addr(SITE + at), DETOUR)
    probes = Probes(native(arch, code, at, detour=detour))
    text = text_of(arch, patched(code, at, new), probes)

    found = Prover(text, arch.patch).classify(text.kernel.symbols.named("f")).exits

    assert [exit_.kind for exit_ in found.exits] == [ExitKind(kind) for kind in kinds]
    assert found.exits[0].addr == SITE + len(code) - (1 if arch is X86_64 else 4)


def test_own_kprobes_of_which_nothing_is_known_make_every_instruction_doubtful() -> None:
    text = text_of(X86_64, X86_CODE, Probes(missing="what its own kprobes have changed was"))

    assert "what its own kprobes have changed was not found" in answer(X86_64, text, 4)


def test_patches_are_taken_back_whichever_is_on_top_and_however_little_is_read() -> None:
    old, first, second = (bytes.fromhex(code) for code in ("41574156", "ccaaaaaa", "eb0011bb"))
    patches = [
        Patch(addr=Addr(SITE), old=first, new=second),
        Patch(addr=Addr(SITE), old=old, new=first),
    ]
    memory = SparseMemory({SITE - 64: bytes(64) + second + bytes(64)})
    for some in (patches, patches[::-1]):
        clean = CleanText(memory, lambda some=some: some)

        assert clean.read(SITE + 1, 2) == old[1:3]
        assert clean.read(SITE - 2, 4) == bytes(2) + old[:2]
        assert clean.read(SITE + 2, 4) == old[2:] + bytes(2)


def test_a_kprobe_that_comes_while_text_is_read_is_taken_back() -> None:
    clean_code, now = bytes.fromhex("4157 4156"), bytes.fromhex("cc57 4156")
    known: list[list[Patch]] = [[]]
    patch = Patch(addr=Addr(SITE), old=clean_code[:1], new=b"\xcc")

    class Memory:
        def read(self, addr: int, size: int) -> bytes:
            known.append([patch])
            return now[addr - SITE : addr - SITE + size]

    assert CleanText(Memory(), lambda: known[-1]).read(SITE, 4) == clean_code
