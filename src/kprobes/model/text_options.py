"""Trace options of the kernel that change the text of events; their names are the kernel's.

What they do, trace_print_context(), print_trace_fmt() and trace_default_header() of kernel/trace
tell. An option is turned off by ``no`` in front of its name, as in the kernel's ``trace_options``.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import fields

from kprobes.errors import UsageError


class TextOptions(Struct, frozen=True, kw_only=True):
    """Which are on.

    Attributes:
        print_parent: functions of the function tracer are followed by their callers.
        sym_offset: functions of stacks, and of the function tracer, have their offsets.
        sym_addr: places of probes and functions are followed by their addresses.
        sym_userobj: addresses in stacks of programs are shown by the file that is mapped there.
        context_info: task, CPU and time stand in front of an event.
        irq_info: with them, in which context it was.
        record_tgid: with them, the pid of the task's process, where records have it.
        fields: the fields are printed as they are, by their sizes.
        raw, hex, bin: of an event only its type is printed, and task, CPU and time are numbers: as
            text, in hex, as their bytes.
        verbose: nothing is said of the columns.
    """

    print_parent: bool = True
    sym_offset: bool = False
    sym_addr: bool = False
    sym_userobj: bool = False
    context_info: bool = True
    irq_info: bool = True
    record_tgid: bool = False
    fields: bool = False
    raw: bool = False
    hex: bool = False
    bin: bool = False
    verbose: bool = False


DEFAULTS = TextOptions()
NAMES = tuple(field.name.replace("_", "-") for field in fields(TextOptions))


def text_options(words: Iterable[str]) -> TextOptions:
    """Return the options that words turn on and, with ``no`` in front, off; the last one counts.

    Raises:
        UsageError: there is no such option.
    """
    found: dict[str, bool] = {}
    for word in words:
        name = word if word in NAMES else word.removeprefix("no")
        if name not in NAMES:
            raise UsageError(f"no such trace option: {word!r}; there are: {', '.join(NAMES)}")
        found[name.replace("-", "_")] = name == word
    return TextOptions(**found)
