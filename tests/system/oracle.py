"""The kernel's own kprobe events beside ours: armed natively, read back, compared hit by hit."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.open import GuestSession
from kprobes.trace import Trace

TRACING = "/sys/kernel/tracing"
_LINE = re.compile(
    r"(?P<comm>.{16})-(?P<pid>\d+) +\[(?P<cpu>\d+)\] (?P<flags>\S+) +"
    r"(?P<s>\d+)\.(?P<us>\d{6}): (?P<event>\w+): \((?P<where>[^()]*)\)(?P<args>.*)",
    re.DOTALL,
)
_LINE_START = re.compile(r".{16}-\d+ +\[\d+\] \S+ +\d+\.\d{6}: ")
_WRITTEN = re.compile(r"entries-in-buffer/entries-written: (\d+)/(\d+)")
_TEXT = r'(?:"(?s:.*)"|\(fault\))'
_WORDS = {
    "char": r"'(?s:.|\\x[0-9a-f]{2})'",
    "symbol": r"[\w.]+(?:\+\w+/\w+)?(?: \[\w+\])?",
}
"""Types of numbers whose text is none."""
ROUNDING_US = 1
_NEVER = 1 << 62
RESCHED, INTERRUPT = 1, 2
"""Where in the flags column a character says "to be rescheduled", and the kind of interrupt."""


BEHIND_THE_CALL = {("o_state", 5), ("o_more", 4)}
"""Events and fields, of amd64, that are not the same after the call of the kernel's own ftrace:
``%orig_ax`` and ``%r11``."""

Stream = tuple[str, int, str]


class Hit(Struct, frozen=True, kw_only=True):
    """One line of a trace.

    Attributes:
        ts_us: microseconds.
        values: every field's text, in definition order.
        faulted: the indices of numbers that could not be read; ours only.
    """

    comm: str
    pid: int
    cpu: int
    flags: str
    ts_us: int
    event: str
    where: str
    values: tuple[str, ...]
    faulted: frozenset[int] = frozenset()

    @property
    def stream(self) -> Stream:
        """What hits share that come one after the other, never nested or at the same time."""
        place = self.pid or -1 - self.cpu
        return self.event, place, self.flags[INTERRUPT]

    @property
    def both(self) -> tuple[object, ...]:
        """What both records of a hit share."""
        return self.stream, self.cpu, self.where

    @property
    def in_interrupt(self) -> bool:
        """Whether an interrupt was being served."""
        return self.flags[INTERRUPT] != "."


Fields = Mapping[str, Sequence[tuple[str, str]]]
"""By event name: every field's name and a pattern of its text."""


class Native(Struct, frozen=True, kw_only=True):
    """What the guest's own kprobe events recorded.

    Attributes:
        text: of its ``trace`` file.
        misses: by event name, as its ``kprobe_profile`` counts them.
    """

    text: str
    misses: Mapping[str, int]

    @property
    def overwritten(self) -> int:
        """How many events its buffer was too small for."""
        found = _WRITTEN.search(self.text)
        assert found is not None, self.text[:500]
        return int(found[2]) - int(found[1])


class Tracefs:
    """The tracing files of a guest that we booted."""

    def __init__(self, session: GuestSession) -> None:
        self._session = session

    def run(self, script: str) -> str:
        """Run a script among the tracing files and return what it wrote; it must succeed."""
        found = self._session.run(f"cd {TRACING}; set -e\n{script}", timeout_s=300)
        output = found.output.decode(errors="backslashreplace")
        assert found.status == 0, f"{script[:200]}\n{output}"
        return output

    def arm(self, definitions: Sequence[str], *, buffer_kib: int) -> None:
        """Arm the kernel's own probes for these definitions; they end with the guest."""
        adds = "".join(f"echo {_quoted(line)} >> kprobe_events\n" for line in definitions)
        self.run(
            f"echo 0 > tracing_on; echo {buffer_kib} > buffer_size_kb\n"
            f"echo 4096 > saved_cmdlines_size\n{adds}"
            "for e in $(cut -d: -f2 kprobe_events | cut -d' ' -f1); do\n"
            "echo 1 > events/$e/enable; done\n: > trace; echo 1 > tracing_on\n"
        )

    def disarm(self) -> None:
        """Remove them, so that others can be armed."""
        self.run(
            "for e in $(cut -d: -f2 kprobe_events | cut -d' ' -f1); do\n"
            "echo 0 > events/$e/enable; done\n: > kprobe_events\n"
        )

    def start(self) -> None:
        """Record from now on."""
        self.run(": > trace; echo 1 > tracing_on")

    def stop(self) -> None:
        """Record no more."""
        self.run("echo 0 > tracing_on")

    def read(self) -> Native:
        """Stop the tracing and return what was recorded."""
        self.stop()
        text = self.run("cat trace")
        return Native(text=text, misses=self.misses())

    def misses(self) -> dict[str, int]:
        """Return how many hits each event has missed, as the kernel counts them."""
        return {
            words[0]: int(words[2])
            for line in self.run("cat kprobe_profile").splitlines()
            if len(words := line.split()) == 3
        }


def record_both(
    session: GuestSession, arm: Callable[[], None], *, arch: str
) -> tuple[Trace, Native]:
    """Record ``/workload.sh`` by our probes and by the kernel's, which ``arm`` arms.

    Of one hit the kernel's come first: ours are after its function tracer's call. On arm64 its
    breakpoint stands in front of ours, and is armed after them, for we call from no function that
    has one.
    """
    if arch == "arm64":
        return record_arming(session, arm)
    tracefs = Tracefs(session)
    arm()
    tracefs.stop()
    return record_arming(session, tracefs.start)


def record_arming(session: GuestSession, arm: Callable[[], None]) -> tuple[Trace, Native]:
    """Record it while the kernel's own record, by ``arm``, after ours and until before."""
    tracefs = Tracefs(session)
    with session.record() as trace:
        arm()
        _work(session)
        tracefs.stop()
    return trace, tracefs.read()


def _work(session: GuestSession) -> None:
    done = session.run("sh /workload.sh", timeout_s=300)
    assert done.status == 0, done.output


def event_of(line: str) -> str:
    """Return the event's name that a definition gives."""
    return line.split(maxsplit=1)[0].partition(":")[2].rpartition("/")[2]


def fields_of(trace: Trace) -> Fields:
    """Return the fields of every event in a trace."""
    return fields_of_layouts(b.layout for events in trace.events for b in events.batches)


def fields_of_layouts(layouts: Iterable[RecordLayout]) -> Fields:
    """Return the fields of the events of some layouts."""
    return {
        layout.event: [(field.name, _pattern(field)) for field in layout.fields]
        for layout in layouts
    }


def our_hits(trace: Trace) -> list[Hit]:
    """Return the lines of our own trace text, with what could not be read."""
    fields = fields_of(trace)
    lines = _lines(trace.to_text())
    faults = list(_faults(trace))
    assert len(lines) == len(faults) == len(trace)
    return [_hit(line, fields, fault) for line, fault in zip(lines, faults, strict=True)]


def native_hits(native: Native, fields: Fields) -> list[Hit]:
    """Return the lines of the kernel's trace text that are of known events."""
    return [_hit(line, fields, frozenset()) for line in _lines(native.text)]


def header_of(text: str) -> list[str]:
    """Return the lines above the events, without their count."""
    return [line for line in text.split("\n") if line[:1] == "#" and "entries-in" not in line]


class Comparison(Struct):
    """Two streams side by side.

    Attributes:
        pairs: (ours, native) of the same hit, ours in order of time.
        ours_only: hits that the kernel has no line of.
        native_only: hits that we have no record of.
        is_ours_first: whether of one hit our record is made first.
    """

    pairs: list[tuple[Hit, Hit]] = field(default_factory=list[tuple[Hit, Hit]])
    ours_only: list[Hit] = field(default_factory=list[Hit])
    native_only: list[Hit] = field(default_factory=list[Hit])
    is_ours_first: bool = True

    @property
    def late_us(self) -> list[int]:
        """How much later the time stamps are of what is recorded second, sorted."""
        sign = 1 if self.is_ours_first else -1
        return sorted(sign * (native.ts_us - ours.ts_us) for ours, native in self.pairs)

    def wrong_values(self) -> list[tuple[Hit, Hit]]:
        """Return the pairs of which a field's text differs that was not a fault."""
        return [pair for pair in self.pairs if not agree(*pair)]

    def differing(self, name: str) -> list[tuple[Hit, Hit]]:
        """Return the pairs that differ in an attribute of a hit."""
        return [(a, b) for a, b in self.pairs if getattr(a, name) != getattr(b, name)]

    def turned(self) -> list[tuple[Hit, Hit]]:
        """Return neighbours of one task that the kernel has the other way round.

        Events of one site are left out: several have the same microsecond.
        """
        found: list[tuple[Hit, Hit]] = []
        last: dict[int, tuple[Hit, Hit]] = {}
        for ours, native in self.pairs:
            before = last.get(ours.pid)
            last[ours.pid] = ours, native
            if before is None or before[0].where == ours.where:
                continue
            if before[1].ts_us > native.ts_us + ROUNDING_US:
                found.append((before[0], ours))
        return found


def compare(
    ours: Iterable[Hit], native: Iterable[Hit], *, is_ours_first: bool = True
) -> Comparison:
    """Pair the hits; of those that come second none before the others' first or after their last.

    That is of a CPU, and but for what was going on when the first ended: between its two records an
    emulated one may have to wait for one of this machine's, for as long as that likes.

    Args:
        ours: all our hits.
        native: the kernel's.
        is_ours_first: whether of one hit our record is made first.
    """
    if not is_ours_first:
        turned = compare(native, ours)
        pairs = sorted(((b, a) for a, b in turned.pairs), key=lambda pair: pair[0].ts_us)
        return Comparison(
            pairs=pairs,
            ours_only=turned.native_only,
            native_only=turned.ours_only,
            is_ours_first=False,
        )
    result = Comparison()
    ours = sorted(ours, key=lambda hit: hit.ts_us)
    mine = _by_stream(ours)
    until = ours[-1].ts_us
    last = _last_hits(ours)
    pending = {hit.both for hit in last if not hit.in_interrupt}
    # Other later ones may be of hits after our disarming: nothing tells.
    theirs = _by_stream(h for h in native if h.ts_us <= until or h.both in pending)
    for stream in mine.keys() | theirs.keys():
        _pair(mine[stream], theirs[stream], result)
    result.pairs.sort(key=lambda pair: pair[0].ts_us)
    result.ours_only = [hit for hit in result.ours_only if hit not in last]
    within = _within(ours)
    result.native_only = [hit for hit in result.native_only if hit.ts_us in within[hit.cpu]]
    return result


def try_offsets(function: str, span: int) -> str:
    """Return a script that says at which offsets the kernel accepts a probe of its own."""
    # Disabled probes are checked and prepared like others, and leave the text as it is.
    return f"""cd {TRACING}
n=0; while [ $n -lt {span} ]; do
    if echo "p:e$n {function}+$n" 2>/dev/null >>kprobe_events
    then echo "$n yes"; echo "-:e$n" >>kprobe_events; else echo "$n no"; fi
    n=$((n+1))
done"""


def accepted_offsets(said: str) -> set[int]:
    """Return what that script said yes to."""
    return {int(offset) for offset in re.findall(r"(\d+) yes", said)}


def unlike(pairs: Iterable[tuple[Hit, Hit]]) -> set[tuple[str, int]]:
    """Return event and number of the fields that differ, but for what could not be read."""
    return {
        (ours.event, index)
        for ours, native in pairs
        for index, (mine, theirs) in enumerate(zip(ours.values, native.values, strict=True))
        if mine != theirs and index not in ours.faulted
    }


def agree(ours: Hit, native: Hit) -> bool:
    """Return whether all fields of two hits have the same text, but for what could not be read."""
    pairs = enumerate(zip(ours.values, native.values, strict=True))
    return all(a == b for index, (a, b) in pairs if index not in ours.faulted)


def _lines(text: str) -> list[str]:
    # A string may hold newlines: what does not look like a line's start continues the one before.
    found: list[str] = []
    for line in text.rstrip("\n").split("\n"):
        if _LINE_START.match(line):
            found.append(line)
        elif found:
            found[-1] += f"\n{line}"
    return found


def _within(hits: Sequence[Hit]) -> defaultdict[int, range]:
    # By CPU: what one looked at before it waited for one of this machine's, whether recording was
    # on, need not be so any more when it takes the time.
    found: defaultdict[int, range] = defaultdict(lambda: range(0))
    for hit in hits:
        first = found[hit.cpu].start if hit.cpu in found else hit.ts_us + 1
        found[hit.cpu] = range(first, hit.ts_us)
    return found


def _last_hits(hits: Iterable[Hit]) -> set[Hit]:
    # What was recorded of the last hit in every context of every CPU.
    contexts: defaultdict[tuple[int, str], list[Hit]] = defaultdict(list)
    for hit in sorted(hits, key=lambda hit: hit.ts_us):
        contexts[hit.cpu, hit.flags[INTERRUPT]].append(hit)
    return {hit for found in contexts.values() for hit in _last_hit(found)}


def _last_hit(hits: Sequence[Hit]) -> Iterable[Hit]:
    # An event is in it once.
    found: dict[str, Hit] = {}
    for hit in reversed(hits):
        if hit.event in found or (hit.pid, hit.where) != (hits[-1].pid, hits[-1].where):
            break
        found[hit.event] = hit
    return found.values()


def _by_stream(hits: Iterable[Hit]) -> defaultdict[Stream, list[Hit]]:
    found: defaultdict[Stream, list[Hit]] = defaultdict(list)
    for hit in hits:
        found[hit.stream].append(hit)
    for stream in found.values():
        stream.sort(key=lambda hit: hit.ts_us)
    return found


def _pair(ours: Sequence[Hit], theirs: Sequence[Hit], result: Comparison) -> None:
    at = 0
    for index, hit in enumerate(ours):
        while at < len(theirs) and theirs[at].ts_us < hit.ts_us - ROUNDING_US:
            result.native_only.append(theirs[at])
            at += 1
        # Its record is the kernel's next one, unless that is of our next hit: then the kernel
        # missed it, an interrupt.
        if at < len(theirs) and not _is_of_next(ours[index : index + 3], theirs[at : at + 2]):
            result.pairs.append((hit, theirs[at]))
            at += 1
        else:
            result.ours_only.append(hit)
    result.native_only += theirs[at:]


def _is_of_next(ours: Sequence[Hit], theirs: Sequence[Hit]) -> bool:
    # Whether the kernel's record is of the second of our hits, and not of the first.
    if len(ours) == 1:
        return False
    hit, following, native = ours[0], ours[1], theirs[0]
    late_us = native.ts_us - following.ts_us
    if not 0 <= late_us <= ROUNDING_US:
        return late_us > 0
    # There may be two hits in a microsecond: the values tell, or whether there are two records.
    is_its, is_of_next = agree(hit, native), agree(following, native)
    if is_its != is_of_next:
        return is_of_next
    until_us = ours[2].ts_us + ROUNDING_US if len(ours) > 2 else _NEVER
    has_another = len(theirs) > 1 and theirs[1].ts_us <= until_us
    return (late_us > 0 or hit.in_interrupt) and not has_another


def _hit(line: str, fields: Fields, faulted: frozenset[int]) -> Hit:
    found = _LINE.fullmatch(line)
    assert found is not None, line
    event = found["event"]
    return Hit(
        comm=found["comm"].lstrip(),
        pid=int(found["pid"]),
        cpu=int(found["cpu"]),
        flags=found["flags"],
        ts_us=int(found["s"]) * 1_000_000 + int(found["us"]),
        event=event,
        where=found["where"],
        values=_values(found["args"], fields[event]),
        faulted=faulted,
    )


def _pattern(field: Field) -> str:
    is_text = field.storage is not Storage.NUMBER or field.type == "symstr"
    one = _TEXT if is_text else _WORDS.get(field.type, r"-?\w+")
    return rf"\{{{','.join([one] * field.count)}\}}" if field.count else one


def _values(args: str, fields: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    pattern = "".join(f" {name}=({text})" for name, text in fields)
    found = re.fullmatch(pattern, args)
    assert found is not None, (pattern, args)
    return found.groups()


def _faults(trace: Trace) -> Iterator[frozenset[int]]:
    for events in trace.events:
        for batch, row in zip(events.batch.tolist(), events.row.tolist(), strict=True):
            found = events.batches[int(batch)]
            yield frozenset(
                field.index
                for field, mask in zip(found.layout.fields, found.faulted, strict=True)
                if field.storage is Storage.NUMBER and mask is not None and mask[row]
            )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
