"""One call of a user's handler: what it raises is told and counted, never passed on.

What goes wrong in a handler: said once for each kind, and counted.
"""

import inspect
import logging
import traceback
from collections.abc import Callable
from types import CodeType

from msgspec import Struct

from kprobes.errors import MemoryFault
from kprobes.handlers.probe import Probe
from kprobes.handlers.registers import Registers

USERS = "__users_handler__"
"""What a function of ours that calls a user's handler has that handler as."""

_log = logging.getLogger("kprobes.handlers")

Warn = Callable[[str], None]
"""Takes one line for the user."""


def warn(words: str) -> None:
    """Log a line as a warning, which Python shows on standard error unless told otherwise."""
    _log.warning("%s", words)


class Report:
    """Tells of a probe's errors.

    Attributes:
        warn: gets the words.
    """

    def __init__(self, warn: Warn = warn) -> None:
        self.warn = warn
        self._reported: set[tuple[object, ...]] = set()

    def error(self, probe: Probe, word: str, error: BaseException) -> None:
        """Count an exception of a handler, and tell of it when it is the first of its kind.

        Args:
            probe: whose handler it was.
            word: which of its handlers, such as ``pre_handler``.
            error: what it raised.
        """
        probe.errors += 1

        def words() -> str:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return f"{word} at {_where(getattr(probe, word), error)}: {what}"

        self._once(probe, (type(error), word), words)

    def wrong(self, probe: Probe, word: str, what: str) -> None:
        """Count what a handler asked for and cannot have, and tell of it once."""
        probe.errors += 1
        self.notice(probe, word, what)

    def notice(self, probe: Probe, word: str, what: str) -> None:
        """Warn once of something that is counted elsewhere."""
        self._once(probe, (what, word), lambda: f"{word} at {_start(getattr(probe, word))}: {what}")

    def _once(self, probe: Probe, kind: tuple[object, ...], words: Callable[[], str]) -> None:
        # To find the words takes a traceback apart.
        if (probe, *kind) not in self._reported:
            self._reported.add((probe, *kind))
            self.warn(f"{probe.place}: {words()} (told once, counted from now on)")


def _where(handler: Callable[..., object], error: BaseException) -> str:
    # The innermost line in the handler's own file: below it may be a library's.
    frames = traceback.extract_tb(error.__traceback__)
    file = _file(handler)
    own = [frame for frame in frames if frame.filename == file] or frames[-1:]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else _start(handler)


def _start(handler: Callable[..., object]) -> str:
    code = _code(handler)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(handler)


def _file(handler: Callable[..., object]) -> str:
    code = _code(handler)
    return code.co_filename if code is not None else ""


def _code(handler: Callable[..., object]) -> CodeType | None:
    own = inspect.unwrap(getattr(handler, USERS, handler))
    return getattr(own, "__code__", None)


FAULT = "fault_handler"

OnFault = Callable[[MemoryFault], object]


class Outcome(Struct, frozen=True, kw_only=True):
    """Whether a handler, or its fault_handler, was satisfied, and what the handler returned."""

    is_well: bool
    returned: object = None


FAILED = Outcome(is_well=False)
_WELL = Outcome(is_well=True)


def call_handler(
    report: Report, probe: Probe, word: str, *given: object, on_fault: OnFault | None = None
) -> Outcome:
    """Call a handler.

    Args:
        report: of what goes wrong in it.
        probe: whose it is.
        word: which one: the attribute that has it.
        given: to the handler.
        on_fault: is asked about memory that is not there, or None.
    """
    began = probe.clock()
    try:
        returned = getattr(probe, word)(*given)
    except MemoryFault as fault:
        return _fault(report, probe, word, fault, on_fault)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user's: anything
        report.error(probe, word, error)
        return FAILED
    if probe.clock() - began > probe.timeout_s:
        what = f"took longer than {probe.timeout_s:g} s: the CPU had gone on without it"
        report.notice(probe, word, what)
    return _WELL if returned is None else Outcome(is_well=True, returned=returned)


def why_not(regs: Registers, *, is_elsewhere: bool) -> str:
    """Return why a CPU cannot go on with some registers, or "".

    Args:
        regs: as a handler left them.
        is_elsewhere: whether it is to go on at their instruction pointer.
    """
    if regs.values_["sp"] < regs.hit_.vcpu.registers["sp"]:
        return "regs.sp may not be lowered: what is below belongs to interrupts"
    if is_elsewhere and not regs.hit_.live.is_code(regs.ip_):
        return f"regs.{regs.pc_} = {regs.ip_:#x} is not code: the CPU did not go there"
    return ""


def changes(regs: Registers) -> dict[str, int]:
    """Return the registers that a handler has changed, without the instruction pointer."""
    return {name: regs.values_[name] for name in regs.changed_ if name != regs.pc_}


def _fault(
    report: Report, probe: Probe, word: str, fault: MemoryFault, on_fault: OnFault | None
) -> Outcome:
    if on_fault is None:
        report.error(probe, word, fault)
        return FAILED
    try:
        is_well = bool(on_fault(fault))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user's: anything
        report.error(probe, FAULT, error)
        return FAILED
    if not is_well:
        report.error(probe, word, fault)
    return Outcome(is_well=is_well)
