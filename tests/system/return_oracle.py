"""The kernel's own return probes beside ours, in one guest: armed, loaded, read back, compared.

The native ones are there all the time, so that they see every return that we see. At an entry the
kernel's own come first, and at a return ours: a return that both took over comes to the trampoline
first of who was the last at the entry, and from there to the other's.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kprobes.inspect.check import checker_of_guest
from kprobes.model.events import Counts
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from tests.build.defined import delete_all, plans_of
from tests.build.dialect import Dialect
from tests.build.returned import Ran
from tests.system import oracle
from tests.system.oracle import Comparison, Hit, Native, Stream, Tracefs

_MAXACTIVE = 256
_BUFFER_KIB = 16384
_AT_ONCE = 100
"""Definitions that fit into one command."""
_ARROW = " <- "
_END = "the load is over"


class Recorded(Struct, frozen=True, kw_only=True):
    """One load, recorded twice.

    Attributes:
        counts: ours.
        misses: of the kernel's own, by event, during this load.
        newest: the last task that there was when ours was armed.
        end_us: when ours was still armed, and all that had returned was recorded. After it a call
            that the kernel's own holds returns to ours once more, however late.
    """

    compared: Comparison
    counts: Counts
    native: Native
    misses: Counter[str]
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

    def __init__(self, session: GuestSession, lines: Sequence[str]) -> None:
        """Arm the kernel's own; ``refused`` are the events that it does not accept."""
        self._session = session
        self._files = Tracefs(session)
        self.refused = self._add(lines)
        both = [line for line in lines if oracle.event_of(line) not in self.refused]
        self._files.run("echo 1 > events/kprobes/enable")
        # Where the kernel's own is at the ftrace site, ours is after it, if it can be.
        entries = "\n".join(f"p:{oracle.event_of(line)} {line.split()[1]}" for line in both)
        verdicts = checker_of_guest(session.driver.guest).check(entries)
        found = list(zip(both, verdicts, strict=True))
        self.lines = [line for line, verdict in found if verdict.is_accepted]
        assert len(self.lines) > 0.95 * len(both)
        for line, verdict in found:
            if not verdict.is_accepted:
                self._files.run(f"echo 0 > events/kprobes/{oracle.event_of(line)}/enable")

    def record(self, load: str, *, return_method: ReturnMethod | None = None) -> Recorded:
        """Run a load with ours armed, probed in a way if one is named."""
        session, before = self._session, self._files.misses()
        session.options = replace(session.options, return_method=return_method)
        delete_all(session)
        session.probe("\n".join(self.lines))
        newest = int(self._files.run(": > trace; echo 1 > tracing_on; echo $$"))
        with session.record() as trace:
            assert session.run(load, timeout_s=300).status == 0
            self._files.run(f"sleep 0.05; echo {_END} > trace_marker; sleep 0.05")
        end_us, native = _cut(self._files.read())
        plans = plans_of(session)
        fields = oracle.fields_of_layouts(p.layout for plan in plans for p in plan.recorded)
        ours, theirs = oracle.our_hits(trace), oracle.native_hits(native, fields)
        return Recorded(
            compared=compare(ours, theirs, end_us),
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


def compare(ours: Sequence[Hit], theirs: Sequence[Hit], end_us: int) -> Comparison:
    """Hold our records of returns against the kernel's, until when ours was still armed."""
    result = oracle.compare(ours, theirs)
    since = min(hit.ts_us for hit in ours)
    # A call that the kernel's own holds returns to us when nothing else does any more.
    result.native_only = [hit for hit in result.native_only if since <= hit.ts_us < end_us]
    return result


def _cut(native: Native) -> tuple[int, Native]:
    # The time of our mark, and what was recorded besides it.
    (found,) = re.finditer(rf".* (\d+)\.(\d{{6}}): tracing_mark_write: {_END}\n", native.text)
    rest = native.text[: found.start()] + native.text[found.end() :]
    return int(found[1]) * 1_000_000 + int(found[2]), replace(native, text=rest)


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
