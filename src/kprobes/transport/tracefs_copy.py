"""A directory that was copied from tracefs: raw pages of the rings, with what describes them.

    per_cpu/cpu0/trace_pipe_raw      // whole pages, as they were read from it
    events/header_page
    events/sched/sched_switch/format
    trace_clock                      // these need not be there
    saved_cmdlines
    printk_formats
    kallsyms                         // of /proc
    uname                            // uname -a

``cp`` of the pages ends only once tracing is off; see docs/howto/recordings.md.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import FormatError, UsageError
from kprobes.formats.ftrace import parse_page
from kprobes.formats.trace_dat_options import TimeShift
from kprobes.formats.trace_dat_reader import Buffer, comms_of, printk_formats_of

_PAGES = "per_cpu/cpu*/trace_pipe_raw"
_CPU = re.compile(r"cpu(\d+)")
_CLOCK = re.compile(r"\[(\w[\w-]*)\]")
_MOST_TEXT = 1 << 26
_MOST_CPU = 1 << 13


class TracefsCopy:
    """What ``formats.trace_dat_reader.TraceDat`` is of a file, of a directory.

    Attributes are the same; it has one buffer.
    """

    def __init__(self, path: Path) -> None:
        """Read all but the pages.

        Raises:
            FormatError: they are not described.
            UsageError: a file cannot be read.
        """
        self._path = path
        self._files = {_cpu_of(file): file for file in path.glob(_PAGES)}
        if not self._files:
            raise FormatError(
                f"a directory without {_PAGES}: neither a recording nor a copy of tracefs"
            )
        self.page = parse_page(self._text("events/header_page"))
        self.cpu_count = max(self._files, default=0) + 1
        uname = self._text("uname", is_needed=False).split()
        self.release = uname[2] if len(uname) > 2 else ""
        self.machine = next((word for word in uname if word in ("x86_64", "aarch64")), "")
        self.events = tuple(
            (file.parent.parent.name, self._text(str(file.relative_to(path))))
            for file in sorted((path / "events").glob("*/*/format"))
        )
        self.kallsyms = self._bytes("kallsyms")
        self.printk_formats = printk_formats_of(self._bytes("printk_formats"))
        self.comms = comms_of(self._bytes("saved_cmdlines"))
        self.offset_ns = 0
        self.tsc2nsec: tuple[int, int, int] | None = None
        self.time_shifts: tuple[TimeShift, ...] = ()
        self.lost: dict[int, int] = {}
        self.is_cut = False
        clock = _CLOCK.search(self._text("trace_clock", is_needed=False))
        self.buffers = (
            Buffer(
                name="",
                clock="local" if clock is None else clock[1],
                page_size=self.page.size,
                cpus=tuple(sorted(self._files)),
            ),
        )

    def pages(self, buffer: int, cpu: int, *, at_once: int) -> Iterator[NDArray[np.uint8]]:
        """Yield a CPU's pages in ring order, copies of shape (n <= at_once, page size).

        Args:
            buffer: 0.
            cpu: of the buffer's.
            at_once: pages at most.
        """
        del buffer
        size = self.page.size
        with self._files[cpu].open("rb") as file:
            while data := file.read(size * at_once):
                whole = len(data) // size * size
                self.is_cut |= whole < len(data)
                if whole:
                    yield np.frombuffer(data, np.uint8, whole).reshape(-1, size)

    def _text(self, name: str, *, is_needed: bool = True) -> str:
        data = self._bytes(name)
        if is_needed and not data:
            raise FormatError(f"pages of a ring without {name}")
        return data.decode(errors="surrogateescape")

    def _bytes(self, name: str) -> bytes:
        try:
            with (self._path / name).open("rb") as file:
                return file.read(_MOST_TEXT)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UsageError(f"cannot read {self._path / name}: {error.strerror}") from error


def _cpu_of(file: Path) -> int:
    found = _CPU.fullmatch(file.parent.name)
    if found is None or int(found[1]) >= _MOST_CPU:
        raise FormatError(f"{file.parent.name} is no CPU")
    return int(found[1])
