"""Debian's arm64 kernel: its text and functions, and its instructions side by side with slots."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from kprobes.arch.aarch64.cfg import find_exits
from kprobes.arch.aarch64.decode import decode_function
from kprobes.arch.aarch64.insn import Kind, classify
from kprobes.arch.aarch64.slot import slot
from kprobes.arch.aarch64.verdict import insn_verdict
from kprobes.formats import kallsyms
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Exits
from kprobes.transport.debian import kernel_image
from kprobes.units import Addr
from tests.build.a64 import NOP, code_of
from tests.build.a64_emulator import Emulator, random_state

BASE = 0xFFFF_8000_0800_0000
"""Where 6.1 links its Image."""
SLOT = Addr(0xFFFF_8000_0A00_0000)

_STATES = 64
_TRIES = 8
"""States to begin in until one raises no fault."""
_TRACED = code_of("d503201f d503201f")
_COUNTERS = (0xFFFFF000, 0xD53BE000)
"""mrs of the timers' registers: two runs never see the same."""


class Arm64Kernel(Struct, frozen=True, eq=False):
    """A kernel's text, without what else its image has.

    Attributes:
        start: where it is.
        text: its bytes.
        functions: (name, address, size), by address.
    """

    start: int
    text: bytes
    functions: tuple[tuple[str, int, int], ...]

    def code(self, addr: int, size: int) -> bytes:
        """Return some of the text."""
        return self.text[addr - self.start : addr - self.start + size]


class Compared(Struct):
    """What came of it, by kind."""

    executed: Counter[str] = field(default_factory=Counter[str])
    faulted: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    differences: list[str] = field(default_factory=list[str])


@cache
def kernel() -> Arm64Kernel:
    """Return Debian's 6.1 kernel for arm64 as its Image holds it."""
    image = kernel_image(suite="bookworm", arch="arm64").read_bytes()
    table = kallsyms.find(image, BASE)
    assert table is not None
    at, size = table.sources[1]
    offsets = np.frombuffer(image, "<u4", size // 4, at - BASE).astype(np.uint64)
    # Offsets count from the first symbol, _stext, which is at the next 64 KiB after the header.
    addrs = (offsets + np.uint64(BASE + 0x10000)).tolist()
    return _made(image, addrs, _names(table))


def _names(table: kallsyms.SymbolTable) -> list[str]:
    blob = bytes(table.blob)
    return [blob[start : blob.index(b"\0", start)].decode() for start in table.starts.tolist()]


def _made(image: bytes, addrs: Sequence[int], names: Sequence[str]) -> Arm64Kernel:
    by_addr = dict(zip(addrs, names, strict=True))
    places = dict(zip(names, addrs, strict=True))
    start, stop = places["_stext"], places["_etext"]
    inside = [addr for addr in sorted(by_addr) if start <= addr < stop]
    return Arm64Kernel(
        start=start,
        text=image[start - BASE : stop - BASE],
        functions=tuple(
            (by_addr[addr], addr, after - addr)
            for addr, after in zip(inside, [*inside[1:], stop], strict=True)
        ),
    )


def compare(*, count: int, per_kind: int, seed: int = 1) -> Compared:
    """Compare a sample of instructions in place and in slots: some of every kind, then any."""
    rng = random.Random(seed)
    states = [random_state(rng) for _ in range(_STATES)]
    found = kernel()
    emulator = Emulator((found.start, found.text), SLOT, states)
    compared = Compared()
    for addr in _sample(found, count, per_kind, np.random.default_rng(seed)):
        _compare_one(emulator, rng, addr, compared)
    return compared


def _sample(
    found: Arm64Kernel, count: int, per_kind: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    words = np.frombuffer(found.text, "<u4")
    kinds = classify(words)
    rows = rng.permutation(len(words) - 1) + 1
    chosen = [rows[kinds[rows] == kind][:per_kind] for kind in Kind]
    taken = np.unique(np.concatenate([*chosen, rows[: max(count - sum(map(len, chosen)), 0)]]))
    return taken * 4


def _compare_one(emulator: Emulator, rng: random.Random, offset: int, compared: Compared) -> None:
    found = kernel()
    addr = Addr(found.start + int(offset))
    # With a nop before it, as paciasp is refused at an entry.
    part = TextPart(addr=Addr(addr - 4), code=code_of(NOP) + found.code(addr, 4))
    function = decode_function("sampled", (part,))
    instruction = function.at(addr)
    assert instruction is not None
    name = instruction.kind.name
    if instruction.word & _COUNTERS[0] == _COUNTERS[1] or insn_verdict(function, addr).is_refused:
        compared.refused[name] += 1
        return
    copy = slot(instruction, SLOT)
    for _ in range(_TRIES):
        here, there = emulator.run(addr, copy, state=rng.randrange(_STATES))
        if not here.fault or not there.fault:
            break
    else:
        compared.faulted[name] += 1
        return
    if here.seen_after(instruction.kind) == there.seen_after(instruction.kind):
        compared.executed[name] += 1
    else:
        compared.differences.append(
            f"{addr:#x} {instruction.word:08x} {copy.hex()}: {here.next:#x}"
        )


def exits_of(name: str, addr: int, size: int) -> Exits:
    """Return the ways out of one function, by its bytes alone and the tracer's sites."""
    return find_exits(name, (TextPart(addr=Addr(addr), code=kernel().code(addr, size)),), _tables())


@cache
def _tables() -> TextTables:
    found = kernel()
    sites = (addr + 4 for _, addr, _ in found.functions if found.code(addr, 8) == _TRACED)
    places = {name: addr for name, addr, _ in found.functions}
    ending = ("panic", "do_exit", "__stack_chk_fail", "fortify_panic", "usercopy_abort")
    return TextTables(ftrace=frozenset(sites), no_return=frozenset(places[name] for name in ending))
