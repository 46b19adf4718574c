"""Time and memory to ask a kernel's debug information, in a fresh process, beside ``perf probe``.

Of Debian's 6.1, 590 MB; files are in memory. perf is asked the same of the same file.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bench.isa import Isa
from bench.spread import Spread
from bench.table import Row, compared, seconds, verdict_of
from tests.build.debug_info import debug_vmlinux

TITLE = "source: what debug information says, each in a fresh process"
_GOAL_S, _GOAL_MIB = 1.5, 300
_FUNCTION = "vfs_read"


class _Question(Struct, frozen=True, kw_only=True):
    # Ours by bench.source_once, perf's by its own words.
    name: str
    ours: tuple[str, str]
    perf: tuple[str, str]


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Ask, in turn with perf."""
    del isa
    vmlinux = debug_vmlinux()
    addr = next(
        line.split()[0]
        for line in _output("nm", str(vmlinux)).splitlines()
        if line.split()[1:] == ["T", _FUNCTION]
    )
    questions = (
        _Question(
            name="variables of a function",
            ours=("variables", addr),
            perf=("-V", _FUNCTION),
        ),
        _Question(
            name="a line of its file",
            ours=("line", "fs/read_write.c:462"),
            perf=("-D", "fs/read_write.c:462"),
        ),
        _Question(
            name="a line of a header",
            ours=("line", "include/linux/fsnotify.h:315"),
            perf=("-D", "include/linux/fsnotify.h:315"),
        ),
        _Question(
            name="copies of an inlined function",
            ours=("inlined", "file_ppos"),
            perf=("-D", "file_ppos"),
        ),
    )
    rounds = 2 if quick else 9
    return [row for each in questions for row in _measured(vmlinux, each, rounds)]


def _measured(vmlinux: Path, question: _Question, rounds: int) -> list[Row]:
    asking = [sys.executable, "-m", "bench.source_once", str(vmlinux), *question.ours]
    perf = ["perf", "probe", "-k", str(vmlinux), *question.perf]
    has_perf = shutil.which("perf") is not None
    memory, ours, theirs = 0, list[float](), list[float]()
    for _ in range(rounds):
        start = time.perf_counter()
        memory = max(memory, int(_output(*asking)))
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        if has_perf:
            _output(*perf)
        theirs.append(time.perf_counter() - start)
    spread = Spread(ours)
    row = Row(name=question.name, figure=_shown(spread))
    if has_perf:
        beside = compared(question.name, spread, Spread(theirs), None, show=_shown)
        row = replace(beside, peer=f"{beside.peer} perf probe")
    return [
        replace(row, goal=seconds(_GOAL_S), verdict=verdict_of(spread.high <= _GOAL_S)),
        Row(
            name="  memory",
            figure=f"{memory} MiB",
            goal=f"{_GOAL_MIB} MiB",
            verdict=verdict_of(memory <= _GOAL_MIB),
        ),
    ]


def _shown(spread: Spread) -> str:
    return f"{seconds(spread.value)} [{seconds(spread.low)} .. {seconds(spread.high)}]"


def _output(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout
