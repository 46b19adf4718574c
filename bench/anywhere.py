"""What a hit costs in the middle of a function: breakpoints and jumps, the guest kernel's and ours.

All on one instruction of one guest, in turn, measured as bench/cost.py does: breakpoints beside the
kernel's own with its optimisation off, jumps beside its own optimised ones.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial

from bench.cost import Arm, Cost, added
from bench.elf_program import GETPPID, Loop
from bench.guest import Rig, boot
from bench.table import Row, times
from kprobes.drivers.instructions import Instructions
from kprobes.drivers.places import places_of
from kprobes.errors import RefusedError
from kprobes.model.plan import Strategy
from kprobes.plan.choose import Wish
from kprobes.units import Addr

TITLE = "anywhere: nanoseconds that a probe adds to a hit in the middle of a function"

_LOOPS = {"getppid": Loop(step=GETPPID, steps=1000, repeats=40)}
_FUNCTION = "__x64_sys_getppid"
_FETCH = "a=%ax"
_OPTIMISE = "/proc/sys/debug/kprobes-optimization"
_LIST = "/sys/kernel/debug/kprobes/list"
_SETTLE_S = 0.5
_GOALS = {Strategy.BREAKPOINT: 3.0, Strategy.JUMP: 15.0}


def run(*, quick: bool = False) -> list[Row]:
    """Boot a guest and measure both strategies on one instruction."""
    with boot(_LOOPS) as rig:
        rig.shell(f"test -e {_LIST} || mount -t debugfs debugfs /sys/kernel/debug")
        offset = _instruction(rig)
        found: dict[str, list[float]] = {}
        for _ in range(3 if quick else 9):
            for name, armed in _turns(rig, offset):
                found.setdefault(name, []).append(added(rig, "getppid", armed))
        return [_row(strategy, found, offset) for strategy in _GOALS]


def _turns(rig: Rig, offset: int) -> Iterator[tuple[str, Arm]]:
    for strategy in _GOALS:
        yield f"{strategy}, ours", partial(_ours, rig, offset, strategy)
        is_optimised = strategy is Strategy.JUMP
        yield f"{strategy}, native", partial(_native, rig, is_optimised=is_optimised)


@contextmanager
def _ours(rig: Rig, offset: int, strategy: Strategy) -> Generator[None]:
    rig.session.driver.strategy = strategy
    with rig.ours(f"p:ours {_FUNCTION}+{offset} {_FETCH}"):
        yield


@contextmanager
def _native(rig: Rig, *, is_optimised: bool) -> Generator[None]:
    rig.shell(f"echo {int(is_optimised)} > {_OPTIMISE}")
    with rig.native("native"):
        time.sleep(_SETTLE_S)
        if ("[OPTIMIZED]" in rig.shell(f"cat {_LIST}")) is not is_optimised:
            raise RuntimeError(f"the guest's kprobe is not as wanted: optimised {is_optimised}")
        yield


def _instruction(rig: Rig) -> int:
    """Return the offset of the first instruction that all four can probe, defined natively."""
    places = places_of(rig.guest)
    function = rig.guest.kernel.symbols.named(_FUNCTION)
    judge = Instructions(places.text, rig.guest.arch.patch)
    for offset in range(1, function.size):
        addr = Addr(function.addr + offset)
        try:
            for strategy in _GOALS:
                judge.site(addr, Wish(strategy=strategy))
        except RefusedError:
            continue
        if addr not in places.text.tables.ftrace and _is_optimised(rig, offset):
            return offset
    raise RuntimeError(f"no instruction of {_FUNCTION} can be probed in all four ways")


def _is_optimised(rig: Rig, offset: int) -> bool:
    rig.define_native([f"p:native {_FUNCTION}+{offset} {_FETCH}"])
    try:
        with _native(rig, is_optimised=True):
            return True
    except RuntimeError:
        rig.define_native(["-:native"])
        return False


def _row(strategy: Strategy, found: dict[str, list[float]], offset: int) -> Row:
    ours, native = (Cost(found[f"{strategy}, {whose}"]) for whose in ("ours", "native"))
    goal, ratio = _GOALS[strategy], native.ns / ours.ns
    peer = "optimised kprobe" if strategy is Strategy.JUMP else "int3 kprobe"
    return Row(
        name=f"{strategy} at {_FUNCTION}+{offset:#x}: kernel's own {peer}",
        figure=str(ours),
        goal=f"{goal:g}x",
        peer=str(native),
        ratio=times(ratio),
        is_met=ratio >= goal,
    )
