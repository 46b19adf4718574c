"""Filters given to the ``filter`` file of a real kernel's event, and what it says to them."""

import re
from collections.abc import Sequence

from msgspec import Struct

from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions

# Nothing is read by a program of its own, which takes an emulated guest longer than all the rest.
_SCRIPT = rb"""
cd /sys/kernel/tracing
show() { while IFS= read -r shown; do printf '%s\n' "$shown"; done < $1; }
cat /definition > kprobe_events
file=$(echo events/kprobes/*/filter)
while IFS= read -r line; do
    : > error_log
    if printf '%s' "$line" 2> /dev/null > $file; then answer=yes; else answer=no; fi
    echo "@@ case"
    echo "$answer"
    show $file
    echo "@@ errors"
    show error_log
    echo 0 > $file
done < /cases
"""
_ANSWER = re.compile(r"(yes|no)\n(.*?)@@ errors\n(.*)", re.DOTALL)
_FILE = re.compile(r"\n( *)\^\nparse_error: .*\n\n")
_LOG = re.compile(r"event filter parse error: error: (.*)\n  Command: [^\0]*?\n( *)\^\n")


class Verdict(Struct, frozen=True):
    """What became of a filter.

    Attributes:
        text, column: of the error in the ``error_log``; "" and -1 without one.
        shown: the column in the ``filter`` file.
    """

    is_accepted: bool
    text: str = ""
    column: int = -1
    shown: int = -1


def insn_verdict(
    definition: str, filters: Sequence[str], options: MachineOptions
) -> tuple[str, dict[str, Verdict]]:
    """Boot a kernel, define an event and give it filters.

    Returns:
        The kernel's release, and its verdict on each filter.
    """
    lines = "".join(f"{text}\n" for text in filters)
    files = {
        "/cases": lines.encode(),
        "/definition": f"{definition}\n".encode(),
        "/judge.sh": _SCRIPT,
    }
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
        output = machine.run("sh /judge.sh", timeout_s=400).output.decode(errors="replace")
    answers = output.split("@@ case\n")[1:]
    assert len(answers) == len(filters), output[-2000:]
    return release, dict(zip(filters, map(_read, answers), strict=True))


def _read(answer: str) -> Verdict:
    found = _ANSWER.fullmatch(answer)
    assert found is not None, answer
    if found[1] == "yes":
        return Verdict(is_accepted=True)
    shown, logged = _FILE.search(found[2]), _LOG.search(found[3])
    return Verdict(
        is_accepted=False,
        text=logged[1] if logged else "",
        # The caret stands below the command, after the 11 characters of "  Command: ".
        column=len(logged[2]) - 11 if logged else -1,
        shown=len(shown[1]) if shown else -1,
    )
