"""Cost of a hit in the middle of a function: breakpoints and jumps, the guest kernel's and ours.

All on one instruction, in turn in each of several guests (see bench/rounds.py): breakpoints beside
the kernel's own with its optimisation off, jumps beside its own optimised ones where it has such.
"""

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from bench.guest import Rig, boot
from bench.isa import Isa, Middle
from bench.many import POLLED, polling
from bench.rounds import Turn, added, in_rounds
from bench.spread import Spread
from bench.table import Goal, Row, compared, ns
from kprobes.errors import RefusedError
from kprobes.guest.places import places_of
from kprobes.guest.text import Instructions
from kprobes.plan.strategy import Wish
from kprobes.units import Addr

TITLE = "anywhere: nanoseconds that a probe adds to a hit in the middle of a function"

_OPTIMISE = "/proc/sys/debug/kprobes-optimization"
_LIST = "/sys/kernel/debug/kprobes/list"
_SETTLE_S = 0.5


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot guests and measure every strategy on one instruction."""
    with boot(isa, {}) as rig:
        _mount(rig)
        place = _instruction(rig, isa)
    loops = {"poll": polling(isa)}
    costs = in_rounds(isa, loops, partial(_measured, isa=isa, place=place), quick=quick)
    return [_row(middle, costs, place) for middle in isa.middles]


def _mount(rig: Rig) -> None:
    rig.shell(f"test -e {_LIST} || mount -t debugfs debugfs /sys/kernel/debug")


def _measured(rig: Rig, passes: int, isa: Isa, place: str) -> Mapping[str, float]:
    _mount(rig)
    return added(rig, list(_turns(rig, isa, place)), passes=passes)


def _turns(rig: Rig, isa: Isa, place: str) -> Iterator[Turn]:
    turn = partial(Turn, program="poll")
    definition = _definition(isa, place)
    for middle in isa.middles:
        for whose, arm in ("ours", _ours), ("native", _native):
            name = f"{middle.strategy}, {whose}"
            yield turn(name=name, arm=partial(arm, rig, definition, middle))


def _definition(isa: Isa, place: str) -> str:
    return f"{place} a=%{isa.first}"


@contextmanager
def _ours(rig: Rig, definition: str, middle: Middle) -> Generator[None]:
    rig.session.options = replace(rig.session.options, strategy=middle.strategy)
    with rig.ours(f"p:ours {definition}"):
        yield


@contextmanager
def _native(rig: Rig, definition: str, middle: Middle) -> Generator[None]:
    if middle.is_optimised is not None:
        rig.shell(f"echo {int(middle.is_optimised)} > {_OPTIMISE}")
    rig.define_native([f"p:native {definition}"])
    try:
        with rig.native("native"):
            time.sleep(_SETTLE_S)
            is_optimised = "[OPTIMIZED]" in rig.shell(f"cat {_LIST}")
            if is_optimised is not bool(middle.is_optimised):
                raise RuntimeError(f"the guest's kprobe is not as wanted: optimised {is_optimised}")
            yield
    finally:
        # Ours are refused where the kernel may optimise its own, as long as it has it.
        rig.define_native(["-:native"])


def _instruction(rig: Rig, isa: Isa) -> str:
    """Return the first instruction that can be probed in all ways."""
    places = places_of(rig.guest)
    function = rig.guest.kernel.symbols.named(POLLED)
    judge = Instructions(places.text, rig.guest.arch.patch)
    for offset in range(1, function.size):
        addr, place = Addr(function.addr + offset), f"{POLLED}+{offset:#x}"
        try:
            for middle in isa.middles:
                judge.site(addr, Wish(strategy=middle.strategy))
        except RefusedError:
            continue
        if addr not in places.text.tables.ftrace and _is_theirs(rig, isa, place):
            return place
    raise RuntimeError(f"no instruction of {POLLED} can be probed in all ways")


def _is_theirs(rig: Rig, isa: Isa, place: str) -> bool:
    try:
        with _native(rig, _definition(isa, place), isa.middles[-1]):
            return True
    except RuntimeError:
        return False


def _row(middle: Middle, costs: Mapping[str, Spread], place: str) -> Row:
    ours, native = (costs[f"{middle.strategy}, {whose}"] for whose in ("ours", "native"))
    name = f"{middle.strategy} at {place}: kernel's own {middle.peer}"
    return compared(name, ours, native, Goal(middle.goal), show=ns)
