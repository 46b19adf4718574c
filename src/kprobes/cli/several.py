"""Several recordings: their names, and how their clocks belong together."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kprobes.cli.terminal import Stop, counted, print_message
from kprobes.errors import UsageError
from kprobes.open_recording import opened_recording
from kprobes.timeline import RealTime, Shift, shift_between

_NS_PER_S = 10**9


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """Return recordings by their names, in their order: those of the files, or else whole paths.

    Raises:
        UsageError: one is standard input, or is there twice.
    """
    if any(str(path) == "-" for path in paths):
        raise UsageError("of several recordings none can be standard input: they are read twice")
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else list(map(str, paths))
    if len(set(names)) < len(names):
        raise UsageError("a recording is given twice")
    return dict(zip(names, paths, strict=True))


def shifts_of(recordings: Mapping[str, Path], stop: Stop) -> dict[str, Shift | None]:
    """Read recordings, and return what brings each one's times to one clock.

    That is the first that is known or, where one has events from before that was 0, the one that
    runs longest. What is shifted is told, with its error.

    Args:
        recordings: by their names.
        stop: of this process.

    Returns:
        by the names; None where the clock is the same, or nothing is known of it.

    Raises:
        UsageError: one has other than one boot.
    """
    clocks = {name: _clock(name, path, stop) for name, path in recordings.items()}
    to = _common([clock for clock in clocks.values() if clock is not None])
    shifts: dict[str, Shift | None] = {}
    for name, clock in clocks.items():
        shift = None if clock is None or to is None else shift_between(clock, to)
        if shift is not None:
            by, error = shift.ns / _NS_PER_S, shift.error / _NS_PER_S
            print_message(f"kprobe: {name}: times are shifted by {by:+.6f} s, +-{error:.6f} s")
        shifts[name] = shift
    return shifts


def _clock(name: str, path: Path, stop: Stop) -> RealTime | None:
    found: list[RealTime | None] = []
    events = 0
    with opened_recording(path) as recording:
        for boot in recording.boots():
            for each in boot.rounds:
                events += len(each)
                stop.check()
            found.append(recording.bounds.real_time())
    if len(found) != 1:
        boots = counted(len(found), "boot")
        raise UsageError(f"{path} has {boots}: of several, each must have one")
    if found[0] is None and events:
        print_message(f"kprobe: {name}: its real time is not known: its times stay as they are")
    return found[0]


def _common(clocks: Sequence[RealTime]) -> RealTime | None:
    if not clocks:
        return None
    to = clocks[0]
    shifts = [Shift(source=each, to=to) for each in clocks]
    if any(int(each.source.times[0]) + each.ns + each.error < 0 for each in shifts):
        to = min(clocks, key=lambda clock: int(clock.offsets[0]))
    return to
