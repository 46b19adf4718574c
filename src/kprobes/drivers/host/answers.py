"""What the kernel says to a line that it refuses: the last entry of its ``error_log``.

[  1234.567890] trace_kprobe: error: Invalid probed address or symbol
  Command: p:kprobes_1_2_3/open nothing
                                ^
"""

import errno
import os
import re

from kprobes.errors import DefinitionError, KprobesError, RefusedError, TargetError, TracefsError
from kprobes.model.codes import Code
from kprobes.model.spelled import Spelled

_COMMAND = "  Command: "
_ENTRY = re.compile(r"^\[ *\d+\.\d+\] [\w ]+: error: (?P<text>.*)\n  Command: (?P<command>.*)\n")
_OURS = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.EPERM, errno.EACCES})
"""What has nothing to do with the line."""
_CODES = {code.text: code for code in Code}


def refusal(error: TracefsError, spelled: Spelled, line: str, log: str) -> KprobesError:
    """Return the kernel's refusal of a line as the definition's error.

    Args:
        error: of the write.
        spelled: what was to be defined.
        line: that was written.
        log: the text of ``error_log`` afterwards.
    """
    if error.number in _OURS:
        return TargetError(f"the kernel defines no more probes: {os.strerror(error.number)}")
    found = last_answer(log, line)
    command = spelled.probe.definition.command
    if found is None:
        return RefusedError(
            f"{command}: the kernel refuses it without a reason "
            f"({os.strerror(error.number)}): {line}"
        )
    text, column = found
    code = _CODES.get(text)
    return DefinitionError(
        code.name if code is not None else "KERNEL",
        text,
        command=command,
        column=spelled.column(line, column),
        hint=f"the kernel was given: {line}",
    )


def last_answer(log: str, line: str) -> tuple[str, int] | None:
    """Return the words and the column of the last entry about a line, or None."""
    for entry in reversed(re.split(r"(?m)^(?=\[)", log)):
        found = _ENTRY.match(entry)
        if found is not None and found["command"].rstrip() == line:
            marked = entry[found.end() :].split("\n")[0]
            return found["text"], max(marked.find("^") - len(_COMMAND), 0)
    return None


def filter_refusal(spelled: Spelled, text: str, shown: str) -> KprobesError:
    """Return the kernel's refusal of a filter.

    Args:
        spelled: whose event it is for.
        text: the filter that was written.
        shown: what the event's filter file says now: the filter, a caret, and the reason.
    """
    command = spelled.probe.definition.command
    lines = shown.rstrip("\n").split("\n")
    reason = lines[-1].removeprefix("parse_error: ")
    if len(lines) < 3:
        return RefusedError(f"{command}: the kernel refuses its filter {text!r}")
    column = max(lines[1].find("^"), 0)
    return DefinitionError("KERNEL", reason, command=text, column=column, hint=f"of {command}")
