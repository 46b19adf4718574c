"""An x-ray of kernel text: its lines, who changed which bytes, and where they lead."""

from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from kprobes.arch.insn import Disassembled, InsnVerdict
from kprobes.model.kernel import Kernel
from kprobes.units import Addr


class ChangeSource(StrEnum):
    """Who changed, or will change, some bytes."""

    OURS = "probe"
    """A probe of ours."""
    FTRACE = "ftrace"
    """The kernel's function tracer: boot's nops, and the guest's own calls."""
    KPROBE = "kprobe"
    """The guest's own kprobes."""
    JUMP_LABEL = "jump label"
    STATIC_CALL = "static call"
    BOOT = "boot"
    """Alternatives, return thunks and what else is rewritten once for this CPU."""
    UNKNOWN = "unknown"


class TextChange(Struct, frozen=True, kw_only=True):
    """Bytes [start, stop) of kernel text that somebody changed or may change.

    Attributes:
        description: who did what, in words.
        is_changed: whether they are not as the kernel would have them idle, or not as in the file.
        leads_to: where execution goes from there, if that is code made at run time; else None.
        probe: name of the probe of ours, else "".
    """

    start: Addr
    stop: Addr
    source: ChangeSource
    description: str
    is_changed: bool
    leads_to: Addr | None = None
    probe: str = ""


class Side(StrEnum):
    """Where a line's bytes are."""

    BOTH = "both"
    IMAGE = "image"
    MEMORY = "memory"


class Row(Struct, frozen=True, kw_only=True):
    """One instruction of the text.

    Attributes:
        line: it, at its running address on both sides.
        side: whether image and memory have it alike.
        name: of what it branches to or names, or "".
        note: what else is to be said, or "".
        verdict: whether it may carry a probe; None where that is not known.
    """

    line: Disassembled
    side: Side
    name: str = ""
    note: str = ""
    verdict: InsnVerdict | None = None


class Detour(Struct, frozen=True, kw_only=True):
    """Code that a change leads to.

    Attributes:
        title: what it is.
        rows: its instructions, by address; a gap is code of others.
    """

    title: str
    addr: Addr
    rows: tuple[Row, ...]


class Subject(Struct, frozen=True, kw_only=True):
    """What is looked at: addresses [start, stop) at their running place.

    Attributes:
        site: the address that was asked for, or None for a range.
    """

    start: Addr
    stop: Addr
    site: Addr | None = None


class FunctionText(Struct, frozen=True, kw_only=True, eq=False):
    """An x-ray.

    Attributes:
        kernel: whose text it is.
        image: the kernel's file, or None without one.
        why_no_image: why there is none, or "".
        is_running: whether memory was looked at, or only the file.
        is_compared: whether both had the text; then rows say which side has them.
        rows: the text, in the order of addresses; of a difference the image's lines come first.
        changes: by address.
        detours: what the marks lead to.
        verdict: on the site that was asked for; None for a range, or what is in no function.
    """

    kernel: Kernel
    subject: Subject
    image: Path | None
    why_no_image: str
    is_running: bool
    is_compared: bool
    rows: tuple[Row, ...]
    changes: tuple[TextChange, ...]
    detours: tuple[Detour, ...]
    verdict: InsnVerdict | None

    def linked(self, addr: int) -> Addr:
        """Return where the image has an address: what System.map says."""
        return Addr(addr - self.kernel.slide)
