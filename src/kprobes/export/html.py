"""One page of a recording that any browser opens, without a network: when, how often, how long.

It has no events but statistics of them, ``export.statistics``, so that it never exceeds
10 MB, of which Plotly's script is 5. What a guest has written is text, never markup: tables escape
it for HTML, charts for JSON and for Plotly's own tags, and the page's policy allows the two scripts
that are in it, by their hashes, and nothing to be loaded.
"""

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from importlib import import_module
from importlib.resources import files
from itertools import zip_longest
from math import log10
from pathlib import Path
from re import sub
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.export.statistics import (
    Durations,
    EventKey,
    EventSummary,
    RecordingSummary,
    SlowCall,
    Timeline,
    TopValues,
    readable,
)
from kprobes.model.events import Events
from kprobes.model.recording import RecordedKernel
from kprobes.sinks.names import TraceSource

# It has no types of its own.
offline: Any = import_module("plotly.offline")
Figure = dict[str, Any]
"""Of Plotly: traces as ``data``, axes and more as ``layout``. A trace's ``meta`` is its color."""

_COLORS = 8
"""Events that have a color, and a row of the timeline; the others share one."""
_SECTIONS, _ROWS, _DEFINITIONS, _CPUS = 16, 200, 50, 4
"""Events with all their tables, lines of the table of events, definitions, CPUs that lost most."""
_TOP, _SLOWEST = 10, 20
_PERCENTILES = (50, 90, 99)
_NS_PER_S = 10**9
_ROW, _CALLS, _GAP, _AXIS = 72, 190, 20, 62
"""Heights in the timeline: of an event, of the slowest calls, of each one's name, of the axis."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {}"


class HtmlFile:
    """The page. Implements ``export.File``."""

    def __init__(self, path: Path, kernel: RecordedKernel, source: TraceSource) -> None:
        """Begin the file; OSError where that is impossible."""
        self._path, self._kernel = path, kernel
        self._file = path.open("wb")
        self._summary = RecordingSummary(source)

    def write(self, events: Events) -> None:
        """Take events, oldest first."""
        self._summary.add(events)

    def lose(self, cpu: int, count: int) -> None:
        """Be told that events of a CPU were lost."""
        self._summary.lose(cpu, count)

    def close(self) -> None:
        """Write the page."""
        with self._file:
            self._file.write(_Page(self._kernel, self._summary).text().encode())

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        self._file.close()
        self._path.unlink(missing_ok=True)


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


class _Page:
    # Its parts, and the figures that they refer to by their place.

    def __init__(self, kernel: RecordedKernel, summary: RecordingSummary) -> None:
        self._kernel, self._summary = kernel, summary
        self._times = _Times(has_ns=kernel.has_ns)
        self._figures: dict[str, Figure] = {}
        ranked = sorted(summary.events.items(), key=lambda pair: -pair[1].hits)
        self._events = dict(ranked)
        self._colors = {key: min(i, _COLORS) for i, key in enumerate(self._events)}

    def text(self) -> str:
        title = f"Kernel events, Linux {readable(self._kernel.release)}"
        body = "".join(self._body(title))
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
            "figures": _json(self._figures),
            **scripts,
        }
        # At once: what is put in is not looked at again.
        return sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _resource("report.html"))

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
        for key, event in [*self._events.items()][:_SECTIONS]:
            yield from self._section(key, event)
        if len(self._events) > _SECTIONS:
            yield f'<p class="dim">The {_SECTIONS} events with the most hits are shown.</p>\n'
        yield f"<footer>Recorded by {escape(readable(self._kernel.writer))}. "
        yield "This page loads nothing and sends nothing. Charts: Plotly, MIT licence.</footer>\n"

    def _header(self) -> Iterator[str]:
        kernel, summary = self._kernel, self._summary
        cpus = "1 CPU" if kernel.cpus == 1 else f"{kernel.cpus:,} CPUs"
        span = self._times.duration(summary.last - summary.first) if self._events else "-"
        items = {
            "recorded": _when(kernel.real_ns),
            "target": readable(kernel.target),
            "architecture": f"{readable(kernel.arch)}, {cpus}",
            "events": f"{summary.hits:,}",
            "first to last event": span,
            "lost": _lost(summary.lost),
        }
        kind = ' class="is-lost"' if summary.lost else ""
        lines = (
            f"<div><dt>{name}</dt><dd{kind if name == 'lost' else ''}>{escape(text)}</dd></div>\n"
            for name, text in items.items()
        )
        yield f'<dl class="facts">\n{"".join(lines)}</dl>\n'
        definitions = {d: None for e in summary.events.values() for d in e.definitions if d}
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
            _Row(
                label=name,
                height=_ROW,
                axis=_counts_axis(int(hits.max())),
                traces=[_area(timeline, hits, times) | {"name": _plotly_text(name), "meta": color}],
            )
            for name, color, hits in self._hits()
        ]
        calls = {
            key: self._events[key].slowest
            for key, color in self._colors.items()
            if color < _COLORS and self._events[key].slowest
        }
        if calls:
            took = [call.duration for each in calls.values() for call in each]
            points = [
                _points(each, times)
                | {"name": _plotly_text(self._name(key)), "meta": f"c{self._colors[key]}"}
                for key, each in calls.items()
            ]
            axis = times.log_axis(min(took), max(took))
            rows.append(_Row(label="the slowest calls", height=_CALLS, axis=axis, traces=points))
        ends = timeline.start, timeline.start + timeline.used * timeline.width
        return _stacked(rows, {**times.axis, "range": [*map(times.at, ends)]})

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
        total = self._summary.hits
        has_durations = any(event.durations.count for event in self._events.values())
        heads = ["event", "hits", "share", "per second"]
        heads += [*(f"p{p}" for p in _PERCENTILES), "max"] if has_durations else []
        rows = [
            [
                _Cell(
                    text=self._name(key),
                    kind="text",
                    share=100 * event.hits / total,
                    color=self._colors[key],
                ),
                _Cell(text=f"{event.hits:,}"),
                _Cell(text=f"{100 * event.hits / total:.1f} %"),
                _Cell(text=self._rate(event.hits)),
                *(self._percentiles(event.durations) if has_durations else ()),
            ]
            for key, event in [*self._events.items()][:_ROWS]
        ]
        more = len(self._events) - _ROWS
        left = f'<p class="dim">And {more:,} more events.</p>' if more > 0 else ""
        return _table(heads, rows) + left

    def _rate(self, hits: int) -> str:
        span = self._summary.last - self._summary.first
        if not span or not self._kernel.has_ns:
            return "-"
        return f"{hits * _NS_PER_S / span:,.1f}"

    def _percentiles(self, durations: Durations) -> list[_Cell]:
        if not durations.count:
            return [_Cell(text="-")] * (len(_PERCENTILES) + 1)
        found = [durations.percentile(each) for each in _PERCENTILES]
        return [self._duration(each) for each in (*found, durations.greatest)]

    def _duration(self, duration: int) -> _Cell:
        return _Cell(text=self._times.duration(duration), title=f"{duration:,}")

    def _section(self, key: EventKey, event: EventSummary) -> Iterator[str]:
        color = self._colors[key]
        yield '<details class="card" open>\n<summary><h3>'
        yield f'<span class="swatch of{color}"></span>{escape(self._name(key))}</h3>'
        yield f'<span class="dim">{event.hits:,} hits</span></summary>\n<div class="columns">\n'
        if event.durations.count:
            yield f'<div class="whole">{self._distribution(event, color)}</div>\n'
        tables: Mapping[str, TopValues] = {
            "task": event.comms,
            **({"function": event.functions} if len(event.functions) > 1 else {}),
            **({"caller": event.callers} if event.callers.total else {}),
            **{readable(name): values for name, values in event.fields.items()},
        }
        for name, values in tables.items():
            yield f"<div>{_values(name, values)}</div>\n"
        if event.slowest:
            calls = self._calls(event.slowest)
            yield f'<div class="whole"><h4>The slowest calls</h4>{calls}</div>\n'
        yield "</div></details>\n"

    def _distribution(self, event: EventSummary, color: int) -> str:
        durations = event.durations
        heads = [*(f"p{p}" for p in _PERCENTILES), "max"]
        items = "".join(
            f"<div><dt>{head}</dt><dd>{escape(cell.text)}</dd></div>"
            for head, cell in zip(heads, self._percentiles(durations), strict=True)
        )
        unknown = event.hits - durations.count
        left = f"; of {unknown:,} the duration is not known" if unknown else ""
        caption = f"How long {durations.count:,} calls took{left}. Percentiles are within 0.2 %."
        return (
            f'<h4>Duration</h4><dl class="percentiles">{items}</dl>'
            f"{self._chart(_histogram(durations, color, self._times), caption)}"
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


def _values(name: str, values: TopValues) -> str:
    # What is left is a line of its own, and so are many values that occur once each.
    top = [(v, n) for v, n in values.top(_TOP) if n > 1 or len(values) <= _TOP]
    rest = values.total - sum(count for _, count in top)
    rows = [
        [
            _Cell(text=text, kind="text", share=100 * count / values.total),
            _Cell(text=f"{count:,}"),
            _Cell(text=f"{100 * count / values.total:.1f} %"),
        ]
        for text, count in top
    ]
    if rest:
        share = f"{100 * rest / values.total:.1f} %"
        words = "others" if top else "different ones"
        others = words if values.error else f"{len(values) - len(top):,} {words}"
        rows.append(
            [_Cell(text=others, kind="text dim"), _Cell(text=f"{rest:,}"), _Cell(text=share)]
        )
    note = f'<p class="dim">Each may be up to {values.error:,} more.</p>' if values.error else ""
    return _table([name, "hits", "share"], rows) + note


class _Times:
    # How times and durations are written: of clocks that count no nanoseconds as they are.

    def __init__(self, *, has_ns: bool) -> None:
        self._has_ns = has_ns
        self.axis: Figure = {"ticksuffix": "s"} if has_ns else {"tickformat": ","}

    def at(self, time: int) -> float:
        return time / _NS_PER_S if self._has_ns else float(time)

    def log_axis(self, low: int, high: int) -> Figure:
        # Plotly's own ticks have no unit between powers of ten.
        ticks = _ticks(low, high)
        texts = [sub(r"\.0+ ", " ", self.duration(each)) for each in ticks]
        return {"type": "log", "tickvals": [*map(self.at, ticks)], "ticktext": texts}

    def text(self, time: int) -> str:
        return f"{time // _NS_PER_S}.{time % _NS_PER_S:09d}" if self._has_ns else f"{time}"

    def duration(self, duration: int) -> str:
        if not self._has_ns:
            return f"{duration:,}"
        for unit, size in (("s", _NS_PER_S), ("ms", 10**6), ("µs", 1000)):
            if duration >= size:
                whole = duration / size
                # Three digits, but no fewer than there are before the point.
                return f"{whole:.{2 if whole < 10 else 1 if whole < 100 else 0}f} {unit}"
        return f"{duration} ns"


class _Row(Struct, frozen=True, kw_only=True):
    label: str
    height: int
    axis: Figure
    traces: list[Figure]


def _stacked(rows: Sequence[_Row], axis: Figure) -> Figure:
    # Rows, the first one on top, that share the axis below them.
    total = sum(row.height for row in rows)
    names = ["y", *(f"y{i}" for i in range(2, len(rows) + 1))]
    layout: Figure = {"height": total + _AXIS, "annotations": [], "hovermode": "closest"}
    layout["xaxis"] = {**axis, "anchor": names[-1], "nticks": 8}
    data: list[Figure] = []
    top = total
    for row, name in zip(rows, names, strict=True):
        domain = [(top - row.height) / total, (top - _GAP) / total]
        layout[f"yaxis{name[1:]}"] = {**row.axis, "domain": domain, "fixedrange": True}
        layout["annotations"].append(_label(row.label, f"{name} domain"))
        data += [trace | {"xaxis": "x", "yaxis": name} for trace in row.traces]
        top -= row.height
    return {"data": data, "layout": layout}


def _label(text: str, domain: str) -> Figure:
    return {
        "text": _plotly_text(text),
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "yref": domain,
        "y": 1,
        "yanchor": "bottom",
        "showarrow": False,
    }


def _plotly_text(text: str) -> str:
    # It has tags and entities of its own.
    return escape(text, quote=False)


def _ticks(low: int, high: int) -> list[int]:
    # Seven at most of 1, 2, 5, 10, ..., or of powers of ten, from low to high, which is 2**64.
    fine = [digit * 10**power for power in range(20) for digit in (1, 2, 5)]
    for step in (1, 3, 6, 9):
        found = [each for each in fine[::step] if low <= each <= high]
        if len(found) <= 7:
            return found
    return []


def _counts_axis(most: int) -> Figure:
    # There are no halves.
    ticks = {"dtick": 1} if most < 4 else {"nticks": 4}
    return {"tickformat": "~s", "rangemode": "tozero", **ticks}


def _area(timeline: Timeline, hits: NDArray[np.int64], times: _Times) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "line": {"shape": "hv", "width": 1},
        "fill": "tozeroy",
        "x0": times.at(timeline.start),
        "dx": times.at(timeline.width),
        "y": [*hits[: timeline.used].tolist(), 0],
        "hovertemplate": "%{y:,} from %{x:.6f} on<extra>%{fullData.name}</extra>",
    }


def _points(calls: Sequence[SlowCall], times: _Times) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "marker": {"size": 6, "opacity": 0.75},
        "cliponaxis": False,
        "x": [times.at(call.ts) for call in calls],
        "y": [times.at(call.duration) for call in calls],
        "customdata": [
            [
                times.duration(call.duration),
                _plotly_text(f"{call.comm}-{call.pid}"),
                call.cpu,
                _plotly_text(readable(call.args)),
                times.text(call.ts),
            ]
            for call in calls
        ],
        "hovertemplate": "<b>%{customdata[0]}</b> %{customdata[1]} on CPU %{customdata[2]}, "
        "returned at %{customdata[4]}<br>%{customdata[3]}<extra>%{fullData.name}</extra>",
    }


def _histogram(durations: Durations, color: int, times: _Times) -> Figure:
    begins, counts = durations.bars()
    marks = [(f"p{each}", durations.percentile(each)) for each in _PERCENTILES]
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "line": {"shape": "hv", "width": 1.5},
                "fill": "tozeroy",
                "x": [times.at(each) for each in begins],
                "y": counts,
                "meta": f"c{color}",
                "hovertemplate": "%{y:,} calls from %{customdata} on<extra></extra>",
                "customdata": [*map(times.duration, begins)],
            }
        ],
        "layout": {
            "height": 230,
            "hovermode": "x",
            "xaxis": {**times.log_axis(begins[0], begins[-1]), "fixedrange": True},
            "yaxis": {**_counts_axis(max(counts)), "fixedrange": True},
            "shapes": [_mark(times.at(value)) for _, value in marks],
            # A logarithmic axis has an annotation's logarithm. One is below the other, as they
            # may be close.
            "annotations": [
                {
                    "text": name,
                    "x": log10(times.at(value)),
                    "xanchor": "left",
                    "yref": "paper",
                    "y": 1.04 - 0.09 * i,
                    "yanchor": "top",
                    "showarrow": False,
                }
                for i, (name, value) in enumerate(marks)
            ],
        },
    }


def _mark(x: float) -> Figure:
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}


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
