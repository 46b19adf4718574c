"""What a hit costs in the middle of a function: breakpoints and jumps, the guest kernel's and ours.

All on one instruction of one guest, in turn, measured as bench/cost.py does: breakpoints beside the
kernel's own with its optimisation off, jumps beside its own optimised ones where it has such.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial

from bench.cost import Arm, Cost, added, ratio_of
from bench.elf_program import Loop
from bench.guest import Rig, boot
from bench.isa import Isa, Middle
from bench.table import Row, times
from kprobes.drivers.instructions import Instructions
from kprobes.drivers.places import places_of
from kprobes.errors import RefusedError
from kprobes.plan.choose import Wish
from kprobes.units import Addr

TITLE = "anywhere: nanoseconds that a probe adds to a hit in the middle of a function"

_OPTIMISE = "/proc/sys/debug/kprobes-optimization"
_LIST = "/sys/kernel/debug/kprobes/list"
_SETTLE_S = 0.5


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot a guest and measure every strategy on one instruction."""
    programs = isa.programs
    loop = Loop(isa=isa, step=programs.getppid, steps=programs.steps, repeats=programs.repeats)
    with boot(isa, {"getppid": loop}) as rig:
        rig.shell(f"test -e {_LIST} || mount -t debugfs debugfs /sys/kernel/debug")
        place = _instruction(rig, isa)
        found: dict[str, list[float]] = {}
        for _ in range(3 if quick else 9):
            for name, armed in _turns(rig, isa, place):
                found.setdefault(name, []).append(added(rig, "getppid", armed))
        return [_row(middle, found, place) for middle in isa.middles]


def _turns(rig: Rig, isa: Isa, place: str) -> Iterator[tuple[str, Arm]]:
    for middle in isa.middles:
        yield f"{middle.strategy}, ours", partial(_ours, rig, _definition(isa, place), middle)
        yield f"{middle.strategy}, native", partial(_native, rig, middle)


def _definition(isa: Isa, place: str) -> str:
    return f"{place} a=%{isa.first}"


@contextmanager
def _ours(rig: Rig, definition: str, middle: Middle) -> Generator[None]:
    rig.session.driver.strategy = middle.strategy
    with rig.ours(f"p:ours {definition}"):
        yield


@contextmanager
def _native(rig: Rig, middle: Middle) -> Generator[None]:
    if middle.is_optimised is not None:
        rig.shell(f"echo {int(middle.is_optimised)} > {_OPTIMISE}")
    with rig.native("native"):
        time.sleep(_SETTLE_S)
        is_optimised = "[OPTIMIZED]" in rig.shell(f"cat {_LIST}")
        if is_optimised is not bool(middle.is_optimised):
            raise RuntimeError(f"the guest's kprobe is not as wanted: optimised {is_optimised}")
        yield


def _instruction(rig: Rig, isa: Isa) -> str:
    """Return the first instruction that can be probed in all ways, defined natively."""
    places = places_of(rig.guest)
    function = rig.guest.kernel.symbols.named(isa.getppid)
    judge = Instructions(places.text, rig.guest.arch.patch)
    for offset in range(1, function.size):
        addr, place = Addr(function.addr + offset), f"{isa.getppid}+{offset:#x}"
        try:
            for middle in isa.middles:
                judge.site(addr, Wish(strategy=middle.strategy))
        except RefusedError:
            continue
        if addr not in places.text.tables.ftrace and _is_theirs(rig, isa, place):
            return place
    raise RuntimeError(f"no instruction of {isa.getppid} can be probed in all ways")


def _is_theirs(rig: Rig, isa: Isa, place: str) -> bool:
    rig.define_native([f"p:native {_definition(isa, place)}"])
    try:
        with _native(rig, isa.middles[-1]):
            return True
    except RuntimeError:
        rig.define_native(["-:native"])
        return False


def _row(middle: Middle, found: dict[str, list[float]], place: str) -> Row:
    ours, native = (Cost(found[f"{middle.strategy}, {whose}"]) for whose in ("ours", "native"))
    ratio = ratio_of(native, ours)
    return Row(
        name=f"{middle.strategy} at {place}: kernel's own {middle.peer}",
        figure=str(ours),
        goal=f"{middle.goal:g}x",
        peer=str(native),
        ratio=times(ratio),
        is_met=ratio >= middle.goal,
    )
