"""Flame graphs of counted stacks: files that viewers read, and a page of its own.

A histogram's entries become frames, outermost first: texts of other keys, the program's calls,
those of the kernel, then the function that was hit. Formats: Brendan Gregg's folded lines, which
flamegraph.pl, inferno and speedscope read; speedscope's own,
https://www.speedscope.app/file-format-schema.json.
"""

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from msgspec import Struct

from kprobes.errors import UsageError
from kprobes.export import load
from kprobes.histogram import Histogram, function_of, symbol_name
from kprobes.model.hist import USER_STACK, HistField, HistKind, Special
from kprobes.model.visible import visible
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import Names

_NEEDED: Mapping[str, Callable[[], Any]] = {
    "html": lambda: load("html"),
    "svg": lambda: load("matplotlib.figure", ""),
}
"""What loads the module that a form is made with."""
Chain = tuple[str, ...]
"""Names of frames, outermost first."""
_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def check_installed(form: str) -> None:
    """Find out whether what a form needs is there.

    Raises:
        UsageError: it is not installed.
    """
    if form in _NEEDED:
        _NEEDED[form]()


def stacks_of(histogram: Histogram) -> Counter[Chain]:
    """Return how many hits each stack has, its frames outermost first, the most first.

    Raises:
        UsageError: the histogram has no stack among its keys.
    """
    trigger, names = histogram.trigger, Names(histogram.source)
    if all(key.kind is not HistKind.STACK for key in trigger.keys):
        raise UsageError("a flame graph is of stacks: count by stack")
    found: Counter[Chain] = Counter()
    rows = zip(*(key.tolist() for key in histogram.keys), strict=True)
    for row, hits in zip(rows, histogram.hitcount.tolist(), strict=True):
        found[tuple(_frames(trigger.keys, row, names))] += hits
    return Counter(dict(found.most_common()))


def _frames(keys: tuple[HistField, ...], row: tuple[Any, ...], names: Names) -> Iterator[str]:
    callers: list[str] = []
    function = ""
    for key, value in zip(keys, row, strict=True):
        if key.kind is HistKind.STACK:
            calls = [_text(function_of(each)) for each in reversed(names.key_stack(key, value))]
            callers = calls + callers if key.name == USER_STACK else callers + calls
        elif key.source is Special.FUNCTION:
            function = _text(symbol_name(value, names))
        else:
            yield _text(value)
    yield from callers
    # A return's stack begins with its caller.
    if function and callers[-1:] != [function]:
        yield function


def _text(value: object) -> str:
    # Of a guest: neither what a terminal acts on, nor what stands between frames.
    text = visible(valid_text(value)) if isinstance(value, bytes) else str(value)
    return text.replace(";", ":")


def folded(stacks: Mapping[Chain, int]) -> bytes:
    """Return a line for each stack: its frames between semicolons, and its hits."""
    return "".join(f"{';'.join(frames)} {hits}\n" for frames, hits in stacks.items()).encode()


def speedscope(stacks: Mapping[Chain, int]) -> bytes:
    """Return speedscope's file."""
    places: dict[str, int] = {}
    samples = [[places.setdefault(name, len(places)) for name in frames] for frames in stacks]
    profile = {
        "type": "sampled",
        "name": "hits",
        "unit": "none",
        "startValue": 0,
        "endValue": sum(stacks.values()),
        "samples": samples,
        "weights": [*stacks.values()],
    }
    whole = {
        "$schema": _SCHEMA,
        "name": "kprobe flame",
        "exporter": "kprobes",
        "shared": {"frames": [{"name": name} for name in places]},
        "profiles": [profile],
    }
    return json.dumps(whole, separators=(",", ":")).encode()


class _Box(Struct, frozen=True, kw_only=True):
    # A frame below the same frames: where it begins, and how many hits it has.
    frames: Chain
    begin: int
    hits: int


def _boxes(stacks: Mapping[Chain, int]) -> list[_Box]:
    # Those of one depth follow each other from left to right, by name.
    found: list[_Box] = []
    begin = 0
    open_boxes: list[tuple[str, int]] = []

    def close(depth: int) -> None:
        while len(open_boxes) > depth:
            frames = tuple(name for name, _ in open_boxes)
            _, start = open_boxes.pop()
            found.append(_Box(frames=frames, begin=start, hits=begin - start))

    for frames, hits in sorted(stacks.items()):
        shared = 0
        for (name, _), frame in zip(open_boxes, frames, strict=False):
            if name != frame:
                break
            shared += 1
        close(shared)
        open_boxes += [(frame, begin) for frame in frames[shared:]]
        begin += hits
    close(0)
    return found


_WHOLE = "all"
_ROW_PX, _MARGIN_PX = 22, 80


def html(stacks: Mapping[Chain, int]) -> bytes:
    """Return a page that any browser opens offline; a click on a frame makes it the whole.

    Raises:
        UsageError: plotly is not installed.
    """
    page = _NEEDED["html"]()
    boxes = [_Box(frames=(), begin=0, hits=sum(stacks.values())), *_boxes(stacks)]
    places = {box.frames: str(number) for number, box in enumerate(boxes)}
    labels = [page.plotly_text(box.frames[-1]) if box.frames else _WHOLE for box in boxes]
    trace = {
        "type": "icicle",
        "ids": [places[box.frames] for box in boxes],
        "labels": labels,
        "parents": [places[box.frames[:-1]] if box.frames else "" for box in boxes],
        "values": [box.hits for box in boxes],
        "branchvalues": "total",
        "tiling": {"orientation": "v", "flip": "y"},
        "hovertemplate": "%{label}<br>%{value} hits, %{percentRoot}<extra></extra>",
        "sort": False,
        "marker": {"line": {"width": 1, "color": "white"}},
    }
    depth = max(len(box.frames) for box in boxes)
    layout = {
        "height": _ROW_PX * (depth + 1) + _MARGIN_PX,
        "xaxis": {"fixedrange": True},
        # A text that would be too small is left out.
        "uniformtext": {"minsize": 8, "mode": "hide"},
    }
    figure = {"data": [trace], "layout": layout}
    title = "Flame graph of hits"
    body = (
        f'<h1>{escape(title)}</h1>\n<div class="card"><div class="chart" id="flame"></div></div>\n'
    )
    text: str = page.page(title, body, {"flame": figure})
    return text.encode()


_WIDTH_IN, _ROW_IN, _CHARACTER = 14.0, 0.2, 0.0042
"""Of a picture in inches, and of a character's share of its width."""
_COLORS = ("#e8743b", "#e3a23f", "#d9853b", "#dfb25a", "#cf6a45")


def svg(stacks: Mapping[Chain, int]) -> bytes:
    """Return a picture of vectors.

    Raises:
        UsageError: matplotlib is not installed.
    """
    boxes, whole = _boxes(stacks), sum(stacks.values()) or 1
    depth = max((len(box.frames) for box in boxes), default=1)
    figure = _NEEDED["svg"]().Figure(figsize=(_WIDTH_IN, _ROW_IN * (depth + 1)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, whole), ylim=(0, depth))
    axes.axis("off")
    for box in boxes:
        row, name = len(box.frames) - 1, box.frames[-1]
        color = _COLORS[sum(name.encode()) % len(_COLORS)]
        axes.broken_barh([(box.begin, box.hits)], (row, 0.95), color=color, linewidth=0)
        room = int(box.hits / whole / _CHARACTER)
        if room > len("..."):
            shown = name if len(name) <= room else f"{name[: room - 2]}.."
            where = (box.begin + whole * _CHARACTER / 2, row + 0.45)
            axes.text(*where, shown, family="monospace", size=7, va="center", parse_math=False)
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "kprobe flame"})
    return out.getvalue()


FORMS: Mapping[str, Callable[[Mapping[Chain, int]], bytes]] = {
    "folded": folded,
    "speedscope": speedscope,
    "html": html,
    "svg": svg,
}
"""By the word for it."""
SUFFIXES = {".folded": "folded", ".speedscope.json": "speedscope", ".html": "html", ".svg": "svg"}
"""By the end of a file's name."""
