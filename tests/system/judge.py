"""Definitions given to a file of a real kernel's, such as ``kprobe_events``, and its answers."""

import re
from collections.abc import Sequence

from msgspec import Struct

from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions

# Each case is some lines and a line "@@"; the last line is judged, those before it prepare.
# Nothing is read by a program of its own, which takes an emulated guest longer than all the rest.
_SCRIPT = rb"""
cd /sys/kernel/tracing
show() { while IFS= read -r shown; do printf '%s\n' "$shown"; done < $1; }
while IFS= read -r line; do
    if [ "$line" = "@@" ]; then
        echo "@@ case"
        echo "$answer"
        echo "@@ listing"
        show $EVENTS
        echo "@@ errors"
        show error_log
        : > $EVENTS
    else
        : > error_log
        if printf '%s\n' "$line" 2> /dev/null >> $EVENTS; then answer=yes; else answer=no; fi
    fi
done < /cases
"""
_ANSWER = re.compile(r"(yes|no)\n@@ listing\n(.*?)@@ errors\n(.*)", re.DOTALL)
_ERROR = re.compile(r"\[[ 0-9.]+\] \w+: error: (.*)\n  Command: (.*)\n( *)\^")


class Verdict(Struct, frozen=True):
    """What became of the last line of a case; everything but ``is_accepted`` may be empty.

    Attributes:
        listing: of all lines of the case together, when the last was accepted.
        text, command, column: of the error.
    """

    is_accepted: bool
    listing: str = ""
    text: str = ""
    command: str = ""
    column: int = -1


def insn_verdict(
    cases: Sequence[str], options: MachineOptions, events: str = "kprobe_events"
) -> tuple[str, tuple[Verdict, ...]]:
    """Boot a kernel and give one of its files cases, each one or more lines of text.

    Returns:
        The kernel's release, and its verdict on each case.
    """
    lines = "".join(f"{case}\n@@\n" for case in cases)
    files = {**options.files, "/cases": lines.encode(), "/judge.sh": _SCRIPT}
    options = MachineOptions(
        memory_mib=256,
        cpus=options.cpus,
        suite=options.suite,
        arch=options.arch,
        kernel=options.kernel,
        files=files,
    )
    with Machine.boot(options) as machine:
        release = machine.run("uname -r").output.decode().strip()
        output = machine.run(f"EVENTS={events} sh /judge.sh", timeout_s=400).output.decode()
    answers = output.split("@@ case\n")[1:]
    assert len(answers) == len(cases), output[-2000:]
    return release, tuple(map(_read, answers))


def _read(answer: str) -> Verdict:
    found = _ANSWER.fullmatch(answer)
    assert found is not None, answer
    if found[1] == "yes":
        return Verdict(is_accepted=True, listing=found[2].strip("\n"))
    error = _ERROR.search(found[3])
    if error is None:
        return Verdict(is_accepted=False)
    # The caret stands below the command, after the 11 characters of "  Command: ".
    text, command, blanks = error[1].strip(), error[2].rstrip(), error[3]
    return Verdict(is_accepted=False, text=text, command=command, column=len(blanks) - 11)
