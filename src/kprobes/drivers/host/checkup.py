"""Whether this machine's own kernel can be probed, and what is in the way."""

import os
from collections.abc import Iterator

from kprobes.drivers.finding import Finding, Verdict, ok
from kprobes.drivers.host.machine import open_machine
from kprobes.drivers.host.obstacles import obstacles
from kprobes.errors import KprobesError


def check_host(*, is_wanted: bool) -> Iterator[Finding]:
    """Look at everything in turn.

    Args:
        is_wanted: whether nothing else will do; else an obstacle is a note: guests are there.
    """
    found = obstacles()
    for each in found:
        yield Finding(
            subject=f"host: {each.subject}",
            verdict=Verdict.MISSING if is_wanted else Verdict.NOTE,
            found=each.found,
            advice=each.advice if is_wanted else f"{each.advice} (guests can be probed without)",
        )
    if found:
        return
    yield ok("host", f"this machine's Linux {os.uname().release} can be probed")
    if is_wanted:
        yield from _details()


def _details() -> Iterator[Finding]:
    try:
        machine = open_machine()
    except KprobesError as error:
        yield Finding(subject="host: kernel", verdict=Verdict.MISSING, found=str(error))
        return
    kernel = machine.kernel
    yield ok("host: symbols", f"{len(kernel.symbols):,} in /proc/kallsyms")
    if kernel.types is None:
        yield Finding(
            subject="host: types",
            verdict=Verdict.NOTE,
            found="the kernel carries none (CONFIG_DEBUG_INFO_BTF)",
            advice="no parameters by name, no -> and no casts: registers and $argN remain",
        )
    else:
        yield ok("host: types", "names of parameters, -> and casts are understood")
    number = len(machine.traceable)
    yield ok("host: functions", f"{number:,} can be probed" if number else "any may be probed")
