"""One page of a recording that any browser opens, without a network: when, how often, how long.

It has no events but statistics of them, those of ``kprobe stats`` and what ``export.charts`` adds,
so that it never exceeds 10 MB, of which Plotly's script is 5. What a guest has written is text,
never markup: tables escape it for HTML, charts for JSON and for Plotly's own tags, and the page's
policy allows the two scripts that are in it, by their hashes, and nothing to be loaded.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from importlib import import_module
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from re import sub
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.export.charts import (
    PERCENTILES,
    ChartRow,
    EventKey,
    Figure,
    RecordingSummary,
    SlowCall,
    Times,
    area,
    counts_axis,
    histogram,
    percentiles,
    plotly_text,
    points,
    readable,
    stacked,
)
from kprobes.export.files import NewFile
from kprobes.model.events import Events
from kprobes.model.recording import RecordedKernel
from kprobes.model.resolved import Storage
from kprobes.sinks.names import TraceSource
from kprobes.statistics import (
    ERROR,
    MAX_EXACT,
    MAX_VALUES,
    Distribution,
    EventStatistics,
    FieldStatistics,
    FrequentValues,
)

# It has no types of its own.
offline: Any = import_module("plotly.offline")

_COLORS = 8
"""Events that have a color, and a row of the timeline; the others share one."""
_SECTIONS, _FIELDS, _ROWS, _DEFINITIONS, _CPUS = 16, 12, 200, 50, 4
"""Events with all their tables, fields of each that have one, lines of the table of events,
definitions, CPUs that lost most."""
_TOP, _SLOWEST = 10, 20
_WITHIN = f"within 1/{1 / ERROR:.0f}"
_QUOTED = {"string": b'"%b"', "ustring": b'"%b"', "symstr": b'"%b"', "char": b"'%b'"}
"""Texts by the type of a field, as a trace file has them."""
_NS_PER_S = 10**9
_ROW, _CALLS = 72, 190
"""Heights in the timeline: of an event, of the slowest calls."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {}"


class HtmlFile:
    """The page. Implements ``export.File``."""

    def __init__(self, path: Path, kernel: RecordedKernel, source: TraceSource) -> None:
        """Begin the file; OSError where that is impossible."""
        self._new, self._kernel = NewFile(path), kernel
        self._summary = RecordingSummary(source)

    def write(self, events: Events) -> None:
        """Take events, oldest first."""
        self._summary.add(events)

    def lose(self, cpu: int, count: int) -> None:
        """Be told that events of a CPU were lost."""
        self._summary.lose(cpu, count)

    def close(self) -> None:
        """Write the page."""
        self._summary.statistics.finish()
        self._new.file.write(_Page(self._kernel, self._summary).text().encode())
        self._new.close()

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        self._new.discard()


class _Cell(Struct, frozen=True, kw_only=True):
    # A number stands on the right; a text has a bar as long as its share; the title is shown
    # where one points.
    text: str
    kind: str = "number"
    share: float | None = None
    title: str = ""
    color: int | None = None

    def html(self) -> str:
        style = "" if self.share is None else f' style="--share:{self.share:.2f}%"'
        title = f' title="{escape(self.title)}"' if self.title else ""
        swatch = "" if self.color is None else f'<span class="swatch of{self.color}"></span>'
        return f'<td class="{self.kind}"{style}{title}>{swatch}{escape(self.text)}</td>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[_Cell]]) -> str:
    # The heads of numbers stand on the right, too.
    found = list(rows)
    kinds = [cell.kind.split()[0] for cell in found[0]] if found else []
    head = "".join(
        f'<th class="{kind}">{escape(name)}</th>'
        for name, kind in zip_longest(heads, kinds, fillvalue="text")
    )
    body = "".join(f"<tr>{''.join(cell.html() for cell in row)}</tr>\n" for row in found)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def page(title: str, body: str, figures: Mapping[str, Figure]) -> str:
    """Return a page that loads nothing.

    Args:
        title: any text.
        body: its markup; an element with a figure's id and the class ``chart`` has that.
        figures: of Plotly.
    """
    scripts = {
        # Should it ever contain one.
        "plotly": offline.get_plotlyjs().replace("</script", "<\\/script"),
        "drawing": _resource("report.js"),
    }
    hashes = (f"'sha256-{_digest(script)}'" for script in scripts.values())
    parts = {
        "policy": _POLICY.format(" ".join(hashes)),
        "title": escape(title),
        "body": body,
        "figures": _json(figures),
        **scripts,
    }
    # At once: what is put in is not looked at again.
    return sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _resource("report.html"))


class _Page:
    # Its parts, and the figures that they refer to by their place.

    def __init__(self, kernel: RecordedKernel, summary: RecordingSummary) -> None:
        self._kernel, self._summary = kernel, summary
        self._times = Times(has_ns=kernel.has_ns)
        self._figures: dict[str, Figure] = {}
        self._statistics = summary.statistics
        ranked = sorted(self._statistics.events.items(), key=lambda pair: -pair[1].hits)
        self._events = dict(ranked)
        self._durations = {key: _durations(event) for key, event in ranked}
        self._colors = {key: min(i, _COLORS) for i, key in enumerate(self._events)}

    def text(self) -> str:
        title = f"Kernel events, Linux {readable(self._kernel.release)}"
        body = "".join(self._body(title))
        return page(title, body, self._figures)

    def _body(self, title: str) -> Iterator[str]:
        yield f"<h1>{escape(title)}</h1>\n"
        yield from self._header()
        if not self._events:
            yield '<p class="card">There are no events.</p>\n'
            return
        yield "<h2>Timeline</h2>\n"
        yield f'<div class="card">{self._chart(self._timeline(), self._timeline_caption())}</div>\n'
        yield "<h2>Events</h2>\n"
        yield f'<div class="card">{self._event_table()}</div>\n'
        yield "<h2>Each event</h2>\n"
        for key in [*self._events][:_SECTIONS]:
            yield from self._section(key)
        if len(self._events) > _SECTIONS:
            yield f'<p class="dim">The {_SECTIONS} events with the most hits are shown.</p>\n'
        yield f"<footer>Recorded by {escape(readable(self._kernel.writer))}. "
        yield "This page loads nothing and sends nothing. Charts: Plotly, MIT licence.</footer>\n"

    def _header(self) -> Iterator[str]:
        kernel, summary = self._kernel, self._summary
        cpus = "1 CPU" if kernel.cpus == 1 else f"{kernel.cpus:,} CPUs"
        span = self._times.duration(self._statistics.span_ns) if self._events else "-"
        items = {
            "recorded": _when(kernel.real_ns),
            "target": readable(kernel.target),
            "architecture": f"{readable(kernel.arch)}, {cpus}",
            "events": f"{self._statistics.hits:,}",
            "first to last event": span,
            "lost": _lost(summary.lost),
        }
        kind = ' class="is-lost"' if summary.lost else ""
        lines = (
            f"<div><dt>{name}</dt><dd{kind if name == 'lost' else ''}>{escape(text)}</dd></div>\n"
            for name, text in items.items()
        )
        yield f'<dl class="facts">\n{"".join(lines)}</dl>\n'
        definitions = {d: None for each in summary.definitions.values() for d in each if d}
        if definitions:
            yield _definitions([*definitions])

    def _chart(self, figure: Figure, caption: str) -> str:
        name = f"figure{len(self._figures)}"
        self._figures[name] = figure
        height = figure["layout"]["height"]
        return (
            f'<figure><div class="chart" id="{name}" style="height:{height}px"></div>'
            f"<figcaption>{escape(caption)}</figcaption></figure>\n"
        )

    def _name(self, key: EventKey) -> str:
        group, event = key
        is_alone = sum(name == event for _, name in self._events) == 1
        return readable(event if is_alone else f"{group}/{event}")

    def _timeline(self) -> Figure:
        timeline, times = self._summary.timeline, self._times
        rows = [
            ChartRow(
                label=name,
                height=_ROW,
                axis=counts_axis(int(hits.max())),
                traces=[area(timeline, hits, times) | {"name": plotly_text(name), "meta": color}],
            )
            for name, color, hits in self._hits()
        ]
        calls = {
            key: found
            for key, color in self._colors.items()
            if color < _COLORS and (found := self._summary.slowest[key].calls)
        }
        if calls:
            took = [call.duration for each in calls.values() for call in each]
            drawn = [
                points(each, times)
                | {"name": plotly_text(self._name(key)), "meta": f"c{self._colors[key]}"}
                for key, each in calls.items()
            ]
            axis = times.log_axis(min(took), max(took))
            rows.append(ChartRow(label="the slowest calls", height=_CALLS, axis=axis, traces=drawn))
        ends = timeline.start, timeline.start + timeline.used * timeline.width
        return stacked(rows, {**times.axis, "range": [*map(times.at, ends)]})

    def _hits(self) -> Iterator[tuple[str, str, NDArray[np.int64]]]:
        # Name, color and counts of each row.
        counts = self._summary.timeline.rows
        others: list[NDArray[np.int64]] = []
        for key, color in self._colors.items():
            if color == _COLORS:
                others.append(counts[key])
            else:
                yield self._name(key), f"c{color}", counts[key]
        if others:
            yield f"{len(others)} other events", f"c{_COLORS}", np.sum(others, axis=0)
        if None in counts:
            yield "lost", "lost", counts[None]

    def _timeline_caption(self) -> str:
        width = self._times.duration(self._summary.timeline.width)
        return f"Hits in {width} each, at the times that kprobe report prints. Drag to zoom."

    def _event_table(self) -> str:
        total = self._statistics.hits
        has_durations = any(self._durations.values())
        heads = ["event", "hits", "share", "per second"]
        heads += [*(f"p{p}" for p in PERCENTILES), "max"] if has_durations else []
        rows = [
            [
                _Cell(
                    text=self._name(key),
                    kind="text",
                    share=100 * event.hits / total,
                    color=self._colors[key],
                ),
                _Cell(text=f"{event.hits:,}"),
                _Cell(text=_share(event.hits, total)),
                _Cell(text=self._rate(event.hits)),
                *(self._percentiles(self._durations[key]) if has_durations else ()),
            ]
            for key, event in [*self._events.items()][:_ROWS]
        ]
        more = len(self._events) - _ROWS
        left = f'<p class="dim">And {more:,} more events.</p>' if more > 0 else ""
        return _table(heads, rows) + left

    def _rate(self, hits: int) -> str:
        rate = self._statistics.rate(hits)
        return "-" if rate is None else f"{rate:,.1f}"

    def _percentiles(self, durations: Distribution | None) -> list[_Cell]:
        if durations is None:
            return [_Cell(text="-")] * (len(PERCENTILES) + 1)
        return [self._duration(each) for each in (*percentiles(durations), durations.most)]

    def _duration(self, duration: int) -> _Cell:
        return _Cell(text=self._times.duration(duration), title=f"{duration:,}")

    def _section(self, key: EventKey) -> Iterator[str]:
        color, event, durations = self._colors[key], self._events[key], self._durations[key]
        yield '<details class="card" open>\n<summary><h3>'
        yield f'<span class="swatch of{color}"></span>{escape(self._name(key))}</h3>'
        yield f'<span class="dim">{event.hits:,} hits</span></summary>\n<div class="columns">\n'
        if durations is not None:
            found = self._distribution(durations, event.hits, color)
            yield f'<div class="whole">{found}</div>\n'
        for table in _tables(event):
            yield f"<div>{table}</div>\n"
        if slowest := self._summary.slowest[key].calls:
            calls = self._calls(slowest)
            yield f'<div class="whole"><h4>The slowest calls</h4>{calls}</div>\n'
        yield "</div></details>\n"

    def _distribution(self, durations: Distribution, hits: int, color: int) -> str:
        heads = [*(f"p{p}" for p in PERCENTILES), "max"]
        items = "".join(
            f"<div><dt>{head}</dt><dd>{escape(cell.text)}</dd></div>"
            for head, cell in zip(heads, self._percentiles(durations), strict=True)
        )
        unknown = hits - durations.count
        left = f"; of {unknown:,} the duration is not known" if unknown else ""
        caption = f"How long {durations.count:,} calls took{left}. {_exactness(durations)}"
        return (
            f'<h4>Duration</h4><dl class="percentiles">{items}</dl>'
            f"{self._chart(histogram(durations, color, self._times), caption)}"
        )

    def _calls(self, calls: Sequence[SlowCall]) -> str:
        rows = [
            [
                self._duration(call.duration),
                _Cell(text=self._times.text(call.ts)),
                _Cell(text=f"{call.cpu}"),
                _Cell(text=f"{call.comm}-{call.pid}", kind="text"),
                _Cell(text=call.args, kind="text args code"),
            ]
            for call in calls[:_SLOWEST]
        ]
        return _table(["duration", "returned at", "CPU", "task", "arguments"], rows)


def _lost(lost: Mapping[int, int]) -> str:
    most = sorted(lost.items(), key=lambda pair: -pair[1])[:_CPUS]
    by_cpu = ", ".join(f"CPU {cpu}: {count:,}" for cpu, count in most)
    others = ", and others" if len(lost) > len(most) else ""
    return f"{sum(lost.values()):,}" + (f" ({by_cpu}{others})" if lost else "")


def _definitions(definitions: Sequence[str]) -> str:
    lines = (
        f"<li><code>{escape(readable(each))}</code></li>\n" for each in definitions[:_DEFINITIONS]
    )
    more = len(definitions) - _DEFINITIONS
    left = f'<li class="dim">and {more:,} more</li>' if more > 0 else ""
    head = '<div class="card"><h4>Definitions</h4><ul class="definitions">'
    return f"{head}\n{''.join(lines)}{left}</ul></div>\n"


def _durations(event: EventStatistics) -> Distribution | None:
    # Those that are known, if there are any.
    found = (each.numbers for each in event.fields.values() if each.is_duration)
    return next((each for each in found if each is not None and each.count), None)


def _exactness(numbers: Distribution) -> str:
    if numbers.is_exact:
        return "Percentiles are exact."
    return f"Percentiles are {_WITHIN}, as more than {MAX_EXACT:,} values are different."


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


class _Values(Struct, frozen=True, kw_only=True):
    # Of one kind: the most frequent ones, how many there are, and how many different ones where
    # that is known; how much each count may be too low; how many could not be read.
    top: list[tuple[str, int]]
    total: int
    different: int | None
    error: int = 0
    faulted: int = 0


def _tables(event: EventStatistics) -> Iterator[str]:
    yield _table_of("task", _texts(event.comms))
    if len(event.functions.counts) > 1:
        yield _table_of("function", _texts(event.functions))
    if event.callers.total:
        yield _table_of("caller", _texts(event.callers))
    # What a task is called is above.
    left_out = (Storage.DURATION.value, Storage.COMM.value)
    fields = [field for key, field in event.fields.items() if key[-1] not in left_out]
    names = [field.name for field in fields]
    for field in fields[:_FIELDS]:
        is_alone = names.count(field.name) == 1
        yield _field_table(field, field.name if is_alone else f"{field.name}:{field.type}")


def _field_table(field: FieldStatistics, label: str) -> str:
    name, numbers = readable(label), field.numbers
    if numbers is None:
        form = _QUOTED.get(field.type, b"%b")
        return _table_of(name, _texts(field.texts, form, field.faulted))
    show = "0x{:x}".format if field.type.startswith("x") else str
    if not numbers.is_exact:
        return _spread(name, numbers, show, field.faulted)
    found = _Values(
        top=[(show(value), count) for value, count in numbers.most_frequent(_TOP)],
        total=numbers.count,
        different=numbers.different,
        faulted=field.faulted,
    )
    return _table_of(name, found)


def _texts(values: FrequentValues, form: bytes = b"%b", faulted: int = 0) -> _Values:
    return _Values(
        top=[(readable(form % value), count) for value, count in values.most_frequent(_TOP)],
        total=values.total,
        different=len(values.counts) if values.is_exact else None,
        error=values.error,
        faulted=faulted,
    )


def _table_of(name: str, values: _Values) -> str:
    # What is left is a line of its own, and so are many values that occur once each.
    mark = "+" if values.error else ""
    found = [(text, count, mark) for text, count in values.top]
    if values.faulted:
        found.append(("(fault)", values.faulted, ""))
    different = None if values.different is None else values.different + (values.faulted > 0)
    is_few = different is not None and different <= _TOP
    found.sort(key=lambda each: -each[1])
    top = [each for each in found[:_TOP] if each[1] > 1 or is_few]
    total = values.total + values.faulted
    rows = [
        [
            _Cell(text=text, kind="text", share=100 * count / total),
            _Cell(text=f"{count:,}{mark}"),
            _Cell(text=_share(count, total)),
        ]
        for text, count, mark in top
    ]
    if rest := total - sum(count for _, count, _ in top):
        others = _Cell(text=_others(different, len(top)), kind="text dim")
        rows.append([others, _Cell(text=f"{rest:,}"), _Cell(text=_share(rest, total))])
    note = _note(values.error) if any(mark for *_, mark in top) else ""
    return _table([name, "hits", "share"], rows) + note


def _others(different: int | None, shown: int) -> str:
    if different is not None:
        return f"{different - shown:,} {'others' if shown else 'different ones'}"
    return "others, at most" if shown else f"more than {MAX_VALUES:,} different ones"


def _note(error: int) -> str:
    words = f"at least so many, and at most {error:,} more"
    return f'<p class="dim">+: {words}, as more than {MAX_VALUES:,} are different.</p>'


def _spread(name: str, numbers: Distribution, show: Callable[[int], str], faulted: int) -> str:
    found = (numbers.least, *percentiles(numbers), numbers.most)
    heads = ("min", *(f"p{each}" for each in PERCENTILES), "max")
    rows = [
        [_Cell(text=head, kind="text"), _Cell(text=show(value))]
        for head, value in zip(heads, found, strict=True)
    ]
    left = f"; {faulted:,} could not be read" if faulted else ""
    note = f"Of {numbers.count:,} values{left}. {_exactness(numbers)}"
    return _table([name, "value"], rows) + f'<p class="dim">{note}</p>'


def _when(real_ns: int) -> str:
    # A file may have any number.
    try:
        return f"{datetime.fromtimestamp(real_ns / _NS_PER_S, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "?"


def _resource(name: str) -> str:
    return files("kprobes.export").joinpath(name).read_text("utf-8")


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def _json(value: object) -> str:
    # In a script element: neither its end nor the start of a comment.
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
