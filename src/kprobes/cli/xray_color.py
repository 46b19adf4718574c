"""Styled lines as a terminal shows them."""

import io
from collections.abc import Sequence

from kprobes.cli.xray_text import Line
from kprobes.model.visible import visible


def as_colors(lines: Sequence[Line]) -> str:
    """Return lines with a terminal's escape sequences."""
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    # No line is broken: a terminal does that itself, and nothing is lost in a pager.
    console = Console(file=out, force_terminal=True, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text.assemble(*((visible(text), style) for text, style in line)))
    return out.getvalue()
