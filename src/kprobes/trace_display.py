"""Traces as notebooks show them: tables in HTML, and plots on the user's matplotlib.

Texts are the guest's: control characters are written out as on terminals, and nothing of them is
markup.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import UsageError
from kprobes.model.columns import Selection, Values
from kprobes.model.events import Batch, Column, Counts
from kprobes.model.resolved import Field, Storage
from kprobes.model.visible import visible
from kprobes.sinks.names import Names, TraceSource

PlotKind = Literal["time", "hist"]
"""Over time, or how values are distributed."""
_ENDS = 5
"""Rows that are shown of a table's beginning, and of its end."""
_BINS = 100
_HIST_BINS = 50
_NS = 1e-9
_OF_ALL = ("ts", "cpu", "pid", "comm", "event", "function")
_NUMBERS = ("ts", "cpu", "pid", "caller")


def events_table(name: str, chosen: Selection, source: TraceSource) -> str:
    """Return the first and the last events of one name in HTML, with a column for each field.

    Args:
        name: of the event.
        chosen: the events.
        source: the kernel that they are of.
    """
    names = Names(source)

    def cells(batch: Batch) -> list[str]:
        found = _base(batch, names) | _fields(batch, names)
        return [found.get(column, "") for column in chosen.names]

    rows = _rows(chosen, cells)
    return _table(f"{_counted(len(chosen))} of {name}", ("", *chosen.names), rows)


def trace_tables(chosen: Selection, source: TraceSource, counts: Counts) -> str:
    """Return in HTML how many events of each name there are, and the first and the last of all.

    Args:
        chosen: all events.
        source: the kernel that they are of.
        counts: of the recording.
    """
    names = Names(source)
    fields: dict[str, dict[str, None]] = {}
    for layout in chosen.layouts:
        own = fields.setdefault(layout.event, {})
        own |= {field.name: None for field in layout.fields}
    kinds = [[name, str(n), ", ".join(fields[name])] for name, n in chosen.counts().items()]

    def cells(batch: Batch) -> list[str]:
        found = _base(batch, names)
        texts = (f"{name}={text}" for name, text in _fields(batch, names).items())
        return [*(found[column] for column in _OF_ALL), " ".join(texts)]

    missed = sum(counts.missed.values()) + sum(counts.nmissed.values())
    title = f"{_counted(len(chosen))}; {counts.lost} lost, {missed} missed"
    rows = _table("", ("", *_OF_ALL, "fields"), _rows(chosen, cells))
    return _table(title, ("event", "events", "fields"), kinds) + rows


def plot_hits(chosen: Selection, source: TraceSource, *, ax: Any = None) -> Any:
    """Draw how many events of each name there were over time, and return the ``Axes``.

    Args:
        chosen: the events.
        source: the kernel that they are of.
        ax: what is drawn on; None for a new figure's.

    Raises:
        UsageError: matplotlib is not installed.
    """
    axes = _axes(ax)
    times = _times(chosen, source)
    if len(times):
        codes, names = chosen.codes(lambda layout: layout.event)
        edges = np.histogram_bin_edges(times, _BINS)
        for code, name in enumerate(names):
            axes.stairs(np.histogram(times[codes == code], edges)[0], edges, label=name)
        axes.legend()
        axes.set_ylabel(f"events in {edges[1] - edges[0]:.3g}{' s' if source.has_ns else ''}")
    axes.set_xlabel("time (s)" if source.has_ns else "time")
    return axes


def plot_field(
    chosen: Selection, source: TraceSource, name: str, *, kind: PlotKind = "time", ax: Any = None
) -> Any:
    """Draw a number of events of one name, and return the ``Axes``.

    Args:
        chosen: the events.
        source: the kernel that they are of.
        name: of a field, or of ``ts``, ``cpu``, ``pid`` or ``caller``.
        kind: over time, or how it is distributed.
        ax: what is drawn on; None for a new figure's.

    Raises:
        UsageError: matplotlib is not installed, or the field is no number.
    """
    if kind not in ("time", "hist"):
        raise UsageError(f"no such kind of a plot: {kind!r}; there are: time, hist")
    values, bad = _numbers(chosen, name)
    known = slice(None) if bad is None else ~bad
    axes = _axes(ax)
    field = chosen.fields.get(name)
    is_time = field is not None and field.storage is Storage.DURATION
    label = f"{name} (ns)" if is_time else name
    if kind == "time":
        axes.plot(_times(chosen, source)[known], values[known], ".", markersize=2, label=name)
        axes.set_xlabel("time (s)" if source.has_ns else "time")
        axes.set_ylabel(label)
        return axes
    _draw_distribution(axes, values[known], is_logarithmic=is_time)
    axes.set_xlabel(label)
    axes.set_ylabel("events")
    return axes


def _rows(chosen: Selection, cells: Callable[[Batch], Iterable[str]]) -> list[list[str]]:
    # With their places; a row of dots stands for those between.
    count = len(chosen)
    if count <= 2 * _ENDS:
        return [[str(i), *cells(batch)] for i, batch in enumerate(chosen.one_by_one())]
    first, last = chosen.cut(slice(_ENDS)), chosen.cut(slice(count - _ENDS, None))
    rows = [[str(i), *cells(batch)] for i, batch in enumerate(first.one_by_one())]
    rows.append(["\N{HORIZONTAL ELLIPSIS}"] * len(rows[0]))
    places = range(count - _ENDS, count)
    return rows + [
        [str(i), *cells(batch)] for i, batch in zip(places, last.one_by_one(), strict=True)
    ]


def _base(batch: Batch, names: Names) -> dict[str, str]:
    # Of a batch of one event.
    found = {
        "ts": str(batch.ts[0]),
        "cpu": str(batch.cpu[0]),
        "pid": str(batch.pid[0]),
        "comm": _visible(bytes(batch.comm[0])),
        "event": batch.layout.event,
        "function": batch.layout.function,
    }
    if batch.caller is not None:
        found["caller"] = _visible(names.callers(batch.caller)[0])
    return found


def _fields(batch: Batch, names: Names) -> dict[str, str]:
    return {
        field.name: ""
        if mask is not None and mask.ndim == 1 and mask[0]
        else _text(field, values[0], names)
        for field, values, mask in zip(
            batch.layout.fields, batch.values, batch.faulted, strict=True
        )
    }


def _text(field: Field, value: Any, names: Names) -> str:
    match value:
        case None:
            return ""
        case bytes() if field.storage is Storage.STACK:
            return _visible(names.stack_text(value))
        case bytes():
            return _visible(value)
        case np.ndarray():
            return f"[{', '.join(_text(field, each, names) for each in value)}]"
        case _ if field.type in ("symbol", "symstr"):
            return _visible(names.symbol(int(value)))
        case _ if field.storage is Storage.DURATION and not value:
            return ""
        case _:
            return f"{value:#x}" if field.type.startswith("x") else str(value)


def _visible(text: bytes) -> str:
    return visible(text.decode(errors="surrogateescape"))


def _counted(count: int) -> str:
    return f"{count} event{'s' * (count != 1)}"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    body = "".join(_table_row("td", row) for row in rows)
    return f"<table>{caption}<thead>{_table_row('th', head)}</thead><tbody>{body}</tbody></table>"


def _table_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>\n"


def _axes(ax: Any) -> Any:
    try:
        pyplot: Any = import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise UsageError("matplotlib is not installed: pip install matplotlib") from error
    return pyplot.subplots()[1] if ax is None else ax


def _times(chosen: Selection, source: TraceSource) -> NDArray[np.float64]:
    return chosen.base("ts")[0] * (_NS if source.has_ns else 1.0)


def _numbers(chosen: Selection, name: str) -> Values:
    # Those that could not be read, or not be measured, are masked.
    field = chosen.fields.get(name)
    if field is None and name not in _NUMBERS:
        raise UsageError(f"{name} is no number")
    values, bad = chosen.gather(name)
    if values.dtype.kind not in "iu" or values.ndim > 1:
        raise UsageError(f"{name} is no number")
    if field is not None and field.storage is Storage.DURATION:
        return values, values == 0 if bad is None else bad | (values == 0)
    return values, bad


def _draw_distribution(axes: Any, values: Column, *, is_logarithmic: bool) -> None:
    if not len(values):
        return
    edges = np.histogram_bin_edges(values, _HIST_BINS)
    if is_logarithmic:
        edges = np.geomspace(float(values.min()), float(values.max()) + 1, _HIST_BINS + 1)
        axes.set_xscale("log")
    axes.stairs(np.histogram(values, edges)[0], edges, fill=True)
