"""Override emitter: whether a function's call is skipped, decided and counted where it was hit.

The words that it counts in are drawn in ``model.override``. No lock is taken and nobody waits: an
NMI may come to the same override on top of a task that is in the middle of it.
"""

from collections.abc import Sequence

from kprobes.codegen import guard
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Value, const
from kprobes.codegen.record import filter_emitter
from kprobes.model.override import (
    ALWAYS,
    OVERRIDE_HITS,
    OVERRIDE_MISSED,
    OVERRIDE_PASSED,
    OVERRIDE_SKIPPED,
    Override,
)

# splitmix64: a counter times GAMMA, mixed by two rounds of shift, exclusive or, multiply.
GAMMA = 0x9E37_79B9_7F4A_7C15
MIX = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB))
LAST_SHIFT = 31


def emit(context: Context, overrides: Sequence[Override]) -> Value | None:
    """Add the code of a site's overrides.

    The first that wants to skip the call leaves its value in the place of the register that has
    what a function returns; those after it see nothing of the call.

    Returns:
        A u64: 1 where the call is skipped, else 0; None without overrides.
    """
    if not overrides:
        return None
    f = context.out
    skip, stay, done = (f.label(hint) for hint in ("skip", "stay", "done"))
    for index, override in enumerate(overrides):
        following = f.label("following")
        words = f.value("i64", context.code.address.format(f"override{index}"))
        _emit_one(context, override, words, (skip, following))
        f.place(following)
    f.jump(stay)
    f.place(stay)
    f.jump(done)
    f.place(skip)
    f.jump(done)
    f.place(done)
    return f.phi({stay: const(0), skip: const(1)})


def _emit_one(context: Context, override: Override, words: Value, ends: tuple[str, str]) -> None:
    f, (skip, following) = context.out, ends
    guard.count_at(context, f.op("add", words, OVERRIDE_HITS))
    filter_ = filter_emitter(context, override.probe, "site")
    filter_.emit_quick(following)
    is_held = override.probe.calls_guest

    def miss() -> None:
        guard.count_at(context, f.op("add", words, OVERRIDE_MISSED))

    # What our own code calls must do what it is called for.
    if is_held:
        guard.hold(context, miss, following)
    elif context.abi.is_guarded:
        guard.check_free(context, miss, following)
    fires, leave = f.label("fires"), f.label("leave")
    filter_.emit_rest(leave)
    _decide(context, override, words, (fires, leave))
    for label, target in ((fires, skip), (leave, following)):
        f.place(label)
        if is_held:
            guard.leave(context)
        if label == fires:
            assert context.result is not None
            f.put(context.result, const(override.value))
        f.jump(target)
    context.early.clear()


def _decide(context: Context, override: Override, words: Value, ends: tuple[str, str]) -> None:
    f, (fires, leave) = context.out, ends
    if override.every > 1 or override.chance < ALWAYS:
        passed = f.take(f.op("add", words, OVERRIDE_PASSED))
        if override.every > 1:
            due = f.label("due")
            turn = f.op("urem", passed, override.every)
            f.branch(f.compare("eq", turn, override.every - 1), due, leave)
            f.place(due)
        if override.chance < ALWAYS:
            drawn = f.label("drawn")
            number = _mixed(context, passed, override.seed)
            f.branch(f.compare("ult", number, override.chance), drawn, leave)
            f.place(drawn)
    skipped = f.op("add", words, OVERRIDE_SKIPPED)
    if override.times is None:
        guard.count_at(context, skipped)
        f.jump(fires)
    else:
        _claim(context, skipped, override.times, ends)


def _claim(context: Context, skipped: Value, times: int, ends: tuple[str, str]) -> None:
    # One more than was there, unless that is enough: other CPUs, and interrupts, do the same.
    f, (fires, leave) = context.out, ends
    again, left = f.label("again"), f.label("left")
    f.jump(again)
    f.place(again)
    before = f.load(skipped)
    f.branch(f.compare("ult", before, times), left, leave)
    f.place(left)
    found = f.exchange(skipped, before, f.op("add", before, 1))
    f.branch(f.compare("eq", found, before), fires, again, is_likely=True)


def _mixed(context: Context, counter: Value, seed: int) -> Value:
    f = context.out
    number = f.op("add", f.op("mul", counter, GAMMA), seed)
    for shift, factor in MIX:
        number = f.op("mul", f.op("xor", number, f.op("lshr", number, shift)), factor)
    return f.op("xor", number, f.op("lshr", number, LAST_SHIFT))
