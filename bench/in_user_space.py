"""A probe's code alone: called in a loop in user space, where nothing else costs anything.

The code is compiled as for the kernel; the words that it uses lie in the program's own memory.
"""

from collections.abc import Callable

from msgspec.structs import replace

from bench.elf_program import DATA, Loop
from bench.isa import Isa
from kprobes.model.abi import PERCPU_LIMIT, PERCPU_WORD, GuestAbi, Template
from kprobes.units import MIB, Addr

_RING = DATA + 0x10000
_RING_SIZE = 4 * MIB
_BODY = Addr(0x400400)

Linked = Callable[[Addr], bytes]
"""Code for the place where it will be."""


def user_abi(isa: Isa, abi: GuestAbi) -> GuestAbi:
    """Return the constants that code needs to run in such a program."""
    return replace(isa.alone.abi(abi), rings=Addr(_RING), ring_size=_RING_SIZE, clock=None)


def linked(code: Template, entry: Callable[[Addr, Addr], bytes] | None = None) -> Linked:
    """Return how a template is put where it will be.

    Args:
        code: of a probe.
        entry: (place, where the template is) to code that comes before it, if there is any.
    """
    # Neither branch nor reader is taken: only the event's number is of any use.
    numbers = {relocation.symbol: 1 for relocation in code.relocations}
    if entry is None:
        return lambda place: code.link(place, numbers)

    def after(place: Addr) -> bytes:
        body = Addr(place + len(entry(place, place)))
        return entry(place, body) + code.link(body, numbers)

    return after


def loop(isa: Isa, code: Linked | None, *, steps: int, repeats: int) -> Loop:
    """Return a program that calls code, or nothing, in a loop."""
    alone = isa.alone
    # The ring's pages are touched once.
    setup = alone.setup.format(data=DATA, ring=_RING, touched=_RING_SIZE + 4096)
    drain = alone.drain.format(word=PERCPU_WORD, limit=PERCPU_LIMIT, ring_size=_RING_SIZE)
    return Loop(
        isa=isa,
        step=drain if code is None else drain + alone.call,
        steps=steps,
        repeats=repeats,
        setup=setup,
        body=b"" if code is None else code(_BODY),
    )
