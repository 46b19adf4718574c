"""Programs one system call of which hits a probed function many times.

What a system call takes, and how that scatters, is so shared by hundreds of hits. On an emulated
arm64 a call alone takes 3.1 us and waits for QEMU's lock twice; a hit's share of a call that makes
200 is 0.3 us, the probed function included.
"""

from bench.elf_program import DATA, Loop
from bench.isa import Isa, Many

POLLED = "eventfd_poll"
"""Called by poll() for each of its files: a file and a table of who waits."""
WRITTEN = "sched_write"
"""Called by writev() for each of its strings: a file, the string, its size and an offset."""

_HITS, _REPEATS = 200, 200
"""A call takes 2 ms at most: less than other work has this machine's CPU for."""
_NONE = DATA + 0x10000


def polling(isa: Isa, *, hits: int = _HITS, repeats: int = _REPEATS, cpus: int = 1) -> Loop:
    """Return a program that hits ``POLLED``."""
    return _loop(isa, isa.programs.poll, hits=hits, repeats=repeats, cpus=cpus)


def writing(isa: Isa, *, repeats: int = _REPEATS) -> Loop:
    """Return a program that hits ``WRITTEN``, with ``elf_program.PATH``."""
    return _loop(isa, isa.programs.writev, hits=_HITS, repeats=repeats, cpus=1)


def _loop(isa: Isa, many: Many, *, hits: int, repeats: int, cpus: int) -> Loop:
    places = {"array": DATA, "count": hits, "none": _NONE}
    return Loop(
        isa=isa,
        setup=many.setup.format(**places),
        step=many.step.format(**places),
        steps=1,
        hits=hits,
        repeats=repeats,
        cpus=cpus,
    )
