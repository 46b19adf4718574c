"""The kernel's own return probes beside ours, in one guest: armed, loaded, read back, compared.

The native ones are there all the time, so that they see every return that we see. At an entry of
amd64 ours come first, as they are chained in front; at one of arm64 the kernel's own. At a return
instruction, and at a tail jump that we took over last, ours come first; a return that both took
over at the entry comes to the trampoline first of who was the last there, and from there to the
other's.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kprobes.drivers.check import checker_of_guest
from kprobes.model.exits import ReturnWay
from kprobes.model.hits import Counts
from kprobes.session import Session
from tests.build.dialect import Dialect, dialect_of
from tests.build.returned import Ran
from tests.guest import oracle
from tests.guest.oracle import Comparison, Hit, Native, Stream, Tracefs

_MAXACTIVE = 256
_MOST_EARLY = 2
"""Calls of one stream that can be in progress when ours is armed."""
_BUFFER_KIB = 16384
_FIRST_US = 1_000_000
"""So long before our first record the kernel's of the same return may be: vCPUs await turns."""
_AT_ONCE = 100
"""Definitions that fit into one command."""
_ARROW = " <- "
_END = "the load is over"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One load, recorded twice.

    Attributes:
        counts: ours.
        misses: of the kernel's own, by event, during this load.
        newest: the last task that there was when ours was armed.
        unlike: streams of calls that both took over, in which the kernel's returns are not ours.
        end_us: when ours was still armed, and all that had returned was recorded. Behind it a call
            that the kernel's own holds returns to ours once more, however late.
    """

    compared: Comparison
    counts: Counts
    native: Native
    misses: Counter[str]
    unlike: list[Stream]
    newest: int
    end_us: int

    def functions(self, names: Iterable[str]) -> set[str]:
        """Return those of some events that both have recorded."""
        return {ours.event for ours, _ in self.compared.pairs} & set(names)

    def unexplained(self) -> list[Hit]:
        """Return our records that the kernel has none of, and does not count as missed either."""
        left = Counter(self.misses)
        found: list[Hit] = []
        for hit in self.compared.ours_only:
            if hit.ts_us >= self.end_us:
                continue
            left[hit.event] -= 1
            if left[hit.event] < 0:
                found.append(hit)
        return found

    def begun_after(self) -> list[Hit]:
        """Return the kernel's records without ours, of calls that began when ours was armed."""
        # A call that was in progress then is the first of its function that its task ends.
        first: dict[Stream, int] = {}
        for _, native in self.compared.pairs:
            first.setdefault(native.stream, native.ts_us)
        return [
            hit
            for hit in self.compared.native_only
            if hit.pid > self.newest or hit.ts_us > first.get(hit.stream, hit.ts_us)
        ]

    def wrong_values(self) -> list[tuple[Hit, Hit]]:
        """Return the pairs of which a field's text differs."""
        return [pair for pair in self.compared.wrong_values() if pair[1].ts_us < self.end_us]


class Pair:
    """Return probes of the guest's own, always armed, and the same of ours for a load each."""

    def __init__(self, session: Session, lines: Sequence[str]) -> None:
        """Arm the kernel's own; ``refused`` are the events that it does not accept."""
        self._session = session
        self._files = Tracefs(session)
        self.refused = self._add(lines)
        both = [line for line in lines if oracle.event_of(line) not in self.refused]
        # Where the kernel's own is at the ftrace site, ours is behind it, if it can be.
        verdicts = checker_of_guest(session.driver.guest).check("\n".join(both))
        found = zip(both, verdicts, strict=True)
        self.lines = [line for line, verdict in found if verdict.is_accepted]
        assert len(self.lines) > 0.95 * len(both)
        self._files.run("echo 1 > events/kprobes/enable")

    def record(self, load: str, *, way: ReturnWay | None = None) -> Recorded:
        """Run a load with ours armed, probed in a way if one is named."""
        session, before = self._session, self._files.misses()
        session.driver.way = way
        session.definitions = []
        session.probe("\n".join(self.lines))
        newest = int(self._files.run(": > trace; echo 1 > tracing_on; echo $$"))
        with session.record() as trace:
            assert session.run(load, timeout_s=120).status == 0
            self._files.run(f"sleep 0.05; echo {_END} > trace_marker; sleep 0.05")
        end_us, native = _cut(self._files.read())
        plans = session.driver.plans
        fields = oracle.fields_of_layouts(p.layout for plan in plans for p in plan.recorded)
        ours, theirs = oracle.our_hits(trace), oracle.native_hits(native, fields)
        assert trace.counts is not None
        compared, unlike = compare(ours, theirs, _hooked(session), end_us)
        return Recorded(
            compared=compared,
            unlike=unlike,
            newest=newest,
            counts=trace.counts,
            native=native,
            misses=Counter(native.misses) - Counter(before),
            end_us=end_us,
        )

    def disarm(self) -> None:
        """Remove the kernel's own."""
        self._files.disarm()

    def _add(self, lines: Sequence[str]) -> set[str]:
        sizes = f"echo {_BUFFER_KIB} > buffer_size_kb; echo 4096 > saved_cmdlines_size"
        self._files.run(f"echo 0 > tracing_on; {sizes}")
        adds = [
            f"echo '{line}' >> kprobe_events 2>/dev/null || echo {oracle.event_of(line)}\n"
            for line in lines
        ]
        parts = (adds[at : at + _AT_ONCE] for at in range(0, len(adds), _AT_ONCE))
        return {name for part in parts for name in self._files.run("".join(part)).split()}


def compare(
    ours: Sequence[Hit], theirs: Sequence[Hit], hooked: Collection[str], end_us: int
) -> tuple[Comparison, list[Stream]]:
    """Hold our records of returns against the kernel's.

    Args:
        ours: all our hits.
        theirs: the kernel's.
        hooked: events whose calls both took over, the kernel last: it records these first, and ours
            may be much later, but in the same order.
        end_us: when ours was still armed.

    Returns:
        What is the same, and the streams of ``hooked`` in which the kernel's are not ours.
    """
    result = Comparison()
    if any(hit.event not in hooked for hit in ours):
        plain = ([hit for hit in hits if hit.event not in hooked] for hits in (ours, theirs))
        result = oracle.compare(*plain)
    since = min(hit.ts_us for hit in ours)
    during = (hit for hit in theirs if since - _FIRST_US <= hit.ts_us < end_us)
    mine, kernels = (
        _streams(hit for hit in hits if hit.event in hooked) for hits in (ours, during)
    )
    unlike = [
        stream
        for stream in mine.keys() | kernels.keys()
        if not _pair_in_order(mine[stream], kernels[stream], since, result)
    ]
    # A call that the kernel's own holds returns to us when nothing else does any more.
    result.native_only = [hit for hit in result.native_only if since <= hit.ts_us < end_us]
    result.pairs.sort(key=lambda pair: pair[0].ts_us)
    return result, unlike


def _cut(native: Native) -> tuple[int, Native]:
    # The time of our mark, and what was recorded besides it.
    (found,) = re.finditer(rf".* (\d+)\.(\d{{6}}): tracing_mark_write: {_END}\n", native.text)
    rest = native.text[: found.start()] + native.text[found.end() :]
    return int(found[1]) * 1_000_000 + int(found[2]), replace(native, text=rest)


def _streams(hits: Iterable[Hit]) -> defaultdict[Stream, list[Hit]]:
    found: defaultdict[Stream, list[Hit]] = defaultdict(list)
    for hit in hits:
        found[hit.stream].append(hit)
    return found


def _pair_in_order(
    ours: Sequence[Hit], theirs: Sequence[Hit], since: int, result: Comparison
) -> bool:
    # The kernel's are some of ours, in the same order, but for those before ours was armed, and
    # for calls that had begun then.
    most = _MOST_EARLY + sum(hit.ts_us < since for hit in theirs)
    ways = [
        (early, pairs)
        for early in range(min(len(theirs), most) + 1)
        if (pairs := _in_order(ours, theirs[early:])) is not None
    ]
    if not ways:
        result.ours_only += ours
        result.native_only += theirs
        return False
    early, pairs = min(ways, key=lambda way: _late(way[1]))
    paired = {id(mine) for mine, _ in pairs}
    result.pairs += pairs
    result.ours_only += [hit for hit in ours if id(hit) not in paired]
    result.native_only += theirs[:early]
    return True


def _in_order(ours: Sequence[Hit], theirs: Sequence[Hit]) -> list[tuple[Hit, Hit]] | None:
    rest, pairs = iter(ours), list[tuple[Hit, Hit]]()
    for native in theirs:
        mine = next((hit for hit in rest if _is_same(hit, native)), None)
        if mine is None:
            return None
        pairs.append((mine, native))
    return pairs


def _is_same(ours: Hit, native: Hit) -> bool:
    is_later = ours.ts_us >= native.ts_us - oracle.ROUNDING_US
    return is_later and oracle.agree(ours, native) and function_of(ours) == function_of(native)


def _late(pairs: Sequence[tuple[Hit, Hit]]) -> int:
    # How many of ours come behind the kernel's next one: too many calls were taken for known.
    return sum(
        ours.ts_us > following.ts_us + oracle.ROUNDING_US
        for (ours, _), (_, following) in pairwise(pairs)
    )


def _hooked(session: Session) -> set[str]:
    # Ours take these over at the entry, and the kernel's own do so after them.
    if dialect_of(session).is_own_probe_first:
        return set()
    returning = (each.returns for plan in session.driver.plans for each in plan.returning)
    hooked = [each for each in returning if each.way is ReturnWay.RETHOOK]
    return {probe.layout.event for each in hooked for probe in each.probes}


def returned_values(ran: Sequence[Ran], dialect: Dialect) -> list[str]:
    """Return a return probe for each of some functions.

    Where nothing is returned, it is of the register that would have the value.
    """
    fetches = (f"%{dialect.value}" if each.is_void else "$retval" for each in ran)
    pairs = enumerate(zip(ran, fetches, strict=True))
    return [f"r{_MAXACTIVE}:e{n} {each.name} ret={fetch}:x64" for n, (each, fetch) in pairs]


def function_of(hit: Hit) -> str:
    """Return which function a return probe's line names."""
    assert _ARROW in hit.where, hit
    return hit.where.partition(_ARROW)[2]


def caller_of(hit: Hit) -> str:
    """Return to where it returned, by its line."""
    return hit.where.partition(_ARROW)[0]
