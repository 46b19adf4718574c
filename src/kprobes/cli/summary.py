"""The words at the end of a trace: what was recorded, what was not, and what it cost."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from kprobes.cli.histograms import as_object
from kprobes.cli.terminal import aligned, counted, json_lines
from kprobes.histogram import Histogram
from kprobes.model.events import Hits
from kprobes.model.visible import visible

_MAX_PROBES = 20
_NO_ROOM = "more calls were in progress than there was room for; rN makes room for N"


class Calls(Struct, frozen=True, kw_only=True):
    """One Python handler's numbers: calls, hits that went on without it, and its errors."""

    name: str
    place: str
    calls: int
    missed: int
    errors: int


class Summary(Struct, frozen=True, kw_only=True):
    """What one trace counted.

    Attributes:
        written: events that were printed.
        faulted: values in them that could not be read.
        probes: every probe's hits.
        lost: records dropped because a ring was full.
        damaged: places in the rings that held no record.
        pauses: how many seconds the guest stood still, and how often; None where there is none.
        command: what the guest ran, in words and how it ended, or "".
        status: what that ended with by itself.
        handlers: what Python did.
        unwritten: events that were to be written and were not, because nobody read in time.
        counted: hits that are in the table of ``kprobe count`` or another one that counts.
        dropped: hits that a table had no room for.
        histograms: what hist triggers of events have counted.
    """

    written: int
    faulted: int
    probes: Sequence[Hits]
    lost: int
    damaged: int
    pauses: tuple[float, int] | None
    command: str = ""
    status: int | None = None
    handlers: Sequence[Calls] = ()
    unwritten: int = 0
    counted: int = 0
    dropped: int = 0
    histograms: Sequence[Histogram] = ()

    @property
    def recorded(self) -> int:
        """Hits that became events, or were counted."""
        return sum(probe.recorded for probe in self.probes) + self.counted

    @property
    def missed(self) -> int:
        """Hits that were not recorded because another was in progress on their CPU."""
        return sum(probe.missed for probe in self.probes)

    @property
    def nmissed(self) -> int:
        """Calls whose return was not seen because too many were in progress."""
        return sum(probe.nmissed for probe in self.probes)

    @property
    def all_missed(self) -> int:
        """All hits that should have become events, but for those lost in a full ring."""
        return self.missed + self.nmissed

    @property
    def over_limit(self) -> int:
        """Events that were disabled, as they had passed a limit."""
        return sum(probe.is_over_limit for probe in self.probes)

    @property
    def unserved(self) -> int:
        """Hits that went on without a handler."""
        return sum(handler.missed for handler in self.handlers)

    @property
    def is_complete(self) -> bool:
        """Whether every hit became an event, and had its handlers."""
        problems = self.all_missed or self.lost or self.damaged or self.unserved
        return not (problems or self.over_limit or self.dropped)

    def shown(self, form: str, *, is_short: bool, is_counting: bool) -> str:
        """Return it in a form.

        Args:
            form: one of ``trace.SUMMARIES``.
            is_short: whether for people only what is missing counts.
            is_counting: whether hits were counted, and are in the output.
        """
        match form:
            case "json":
                return self.json()
            case "kprobe_profile":
                return self.kprobe_profile()
            case _:
                text = self.losses() if is_short else self.text(is_counting=is_counting)
                return text + self._tables()

    def kprobe_profile(self) -> str:
        """Return the kernel's ``kprobe_profile`` file: event, hits and misses of each probe.

        probes_profile_seq_show() in kernel/trace/trace_kprobe.c.
        """
        return "".join(
            f"  {p.event:<44} {p.recorded:>15} {p.all_missed:>15}\n" for p in self.probes
        )

    def text(self, *, is_counting: bool = False) -> str:
        """Return all of it, for people; of what was counted that is in the output, without it."""
        lines = [f"\n{self._events()}{self._paused()}\n", _table(self.probes)]
        if is_counting:
            lines = [f"\n{self.all_missed:,} missed, {self.lost:,} lost{self._paused()}\n"]
        lines += [_handlers(self.handlers), self.losses()]
        if self.command:
            lines.append(f"  {self.command}\n")
        return "".join(lines)

    def json(self) -> str:
        """Return all of it as one line of JSON: docs/reference/formats/json.md."""
        pauses = (
            None if self.pauses is None else dict(zip(("s", "stops"), self.pauses, strict=True))
        )
        figures = ("recorded", "missed", "nmissed", "unserved", "over_limit", "is_complete")
        shown = {name: getattr(self, name) for name in figures}
        probes, handlers = (list(map(asdict, each)) for each in (self.probes, self.handlers))
        parts = {
            "probes": list(map(_json, probes)),
            "handlers": handlers,
            "pauses": pauses,
            "histograms": list(map(as_object, self.histograms)),
        }
        return json_lines([_json(asdict(self) | parts | shown)])

    def losses(self) -> str:
        """Return what is missing in the events, which nobody may keep quiet about, or ""."""
        parts = [
            self.missed and f"{counted(self.missed, 'hit')} missed: another was in progress there",
            self.nmissed and f"{counted(self.nmissed, 'return')} missed: {_NO_ROOM}",
            self.unserved
            and f"{counted(self.unserved, 'hit')} went on without a handler: one was slow",
            self.unwritten
            and f"{counted(self.unwritten, 'event')} not written: the output took them too slowly",
            self.lost and f"{counted(self.lost, 'event')} lost: a larger --buffer-size keeps more",
            self.damaged and f"{counted(self.damaged, 'damaged place')} in the rings",
            self.dropped and f"{counted(self.dropped, 'hit')} not counted: the table was full",
            self.over_limit and f"{counted(self.over_limit, 'event')} disabled: over a limit",
            self.faulted and f"{counted(self.faulted, 'value')} could not be read (fault)",
        ]
        return "".join(f"  {part}\n" for part in parts if part)

    def _tables(self) -> str:
        # As the events' hist files, which nobody may keep quiet about: they were asked for.
        names = (f"{visible(each.event)}\n" if each.event else "" for each in self.histograms)
        return "".join(f"\n{n}{each}" for n, each in zip(names, self.histograms, strict=True))

    def _paused(self) -> str:
        if self.pauses is None:
            return ""
        paused_s, stops = self.pauses
        return f"; guest paused for {paused_s * 1000:.1f} ms in {counted(stops, 'stop')}"

    def _events(self) -> str:
        if self.written == self.recorded:
            return (
                f"{counted(self.written, 'event')}, {self.all_missed:,} missed, {self.lost:,} lost"
            )
        shown = f"{self.written:,} of {counted(self.recorded, 'event')}"
        return f"{shown}, {self.all_missed:,} missed, {self.lost:,} lost"


def _json(items: dict[str, Any]) -> dict[str, Any]:
    # JSON's own word, older than the kernel's here; and not what is of one session only.
    shown = ((name, value) for name, value in items.items() if name != "event_id")
    return {"unkept" if name == "nmissed" else name: value for name, value in shown}


def _table(probes: Sequence[Hits]) -> str:
    hit = [p for p in probes if p.recorded or p.all_missed or p.is_over_limit]
    hit.sort(key=lambda p: (not p.is_over_limit, -p.recorded))
    rows = [(p.event, f"{p.recorded:>9,}", p.function, _missed(p)) for p in hit]
    rest = hit[_MAX_PROBES:]
    more = (
        f"{counted(len(rest), 'probe')} more with {counted(sum(p.recorded for p in rest), 'hit')}"
    )
    text = aligned(rows, indent="  ", most=_MAX_PROBES, more=more)
    if len(probes) > len(hit):
        text += f"  {counted(len(probes) - len(hit), 'probe')} without a hit\n"
    return text


def _handlers(handlers: Sequence[Calls]) -> str:
    rows = [
        (
            each.name,
            f"{each.calls:>9,}",
            each.place,
            f"{each.missed:,} missed" if each.missed else "",
            counted(each.errors, "error") if each.errors else "",
        )
        for each in handlers
    ]
    return aligned(rows, indent="  ")


def _missed(probe: Hits) -> str:
    causes = [
        f"{number:,} {cause}"
        for number, cause in ((probe.missed, "another hit in progress"), (probe.nmissed, "no room"))
        if number
    ]
    missed = f"{probe.all_missed:,} missed ({', '.join(causes)})" if causes else ""
    over = "disabled: over a limit" if probe.is_over_limit else ""
    return ", ".join(filter(None, (over, missed)))
