"""Running a stopped guest up to a breakpoint."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

from kprobes.errors import TargetError
from kprobes.formats.rsp import StopReply
from kprobes.guest.allocations import nothing
from kprobes.transport.stub import SIGTRAP, Stub
from kprobes.units import Addr

MIGRATED = (
    "the guest was migrated: it has its probes where it runs now, and `kprobe restore --target` "
    "ends them there"
)
PAUSED = "the guest is paused, and must run for this: let it go on (`cont` in its monitor)"
_CHECK_S = 0.05


@contextmanager
def breakpoint_at(debugger: Stub, place: Addr, *, is_hardware: bool = False) -> Generator[None]:
    """Have a breakpoint in a stopped guest.

    Args:
        debugger: of the guest.
        place: where.
        is_hardware: see ``Stub.insert_breakpoint``.
    """
    with ExitStack() as undo:
        undo.callback(_forget, debugger, place)
        debugger.insert_breakpoint(place, is_hardware=is_hardware)
        yield


def _forget(debugger: Stub, place: Addr) -> None:
    # It runs when it could not be stopped: it is gone then, and this says so.
    with debugger.paused():
        debugger.remove_breakpoint(place)


def run_until_stop(
    debugger: Stub, deadline: float, check: Callable[[], None] = nothing
) -> int | None:
    """Let the guest run until a vCPU stops it; return that vCPU, or None at the deadline.

    The guest is stopped again in either case. Where it stops for another debugger that is served,
    it goes on when that lets it, and the deadline waits.

    Args:
        debugger: of the guest.
        deadline: by time.monotonic().
        check: called now and then meanwhile; what it raises ends the waiting.

    Raises:
        TargetError: somebody else has stopped the guest.
    """
    while True:
        stopped = _run_until_stop(debugger, deadline, check)
        if not debugger.is_debugged:
            break
        deadline += serve_debugger(debugger, check)
    if debugger.is_held:
        raise TargetError(PAUSED)
    return None if stopped is None else stopped.cpu


def serve_debugger(stub: Stub, check: Callable[[], None] = nothing) -> float:
    """Have a guest stand for another debugger for as long as that likes; return the seconds.

    Args:
        stub: of the guest, which is stopped before and after.
        check: as of ``run_until_stop``.
    """
    began = time.monotonic()
    while stub.is_debugged:
        if time.monotonic() > stub.held_until_s:
            stub.go()
        elif stub.debugger is not None:
            stub.debugger.serve(check)
        else:
            time.sleep(_CHECK_S)
            check()
        if stub.is_running:
            stub.stop()
    return time.monotonic() - began


def _run_until_stop(debugger: Stub, deadline: float, check: Callable[[], None]) -> StopReply | None:
    debugger.resume()
    try:
        while (stopped := debugger.wait(_left(deadline, most=_CHECK_S))) is None:
            check()
            if debugger.is_debugged or not _left(deadline):
                break
    except BaseException:
        # Ctrl-C, too: whoever takes breakpoints away needs a stopped guest.
        if debugger.is_running:
            debugger.stop()
        raise
    if debugger.is_running:
        # It may come to a breakpoint before it is stopped.
        reply = debugger.stop()
        stopped = reply if reply.signal == SIGTRAP else None
    return stopped


def _left(deadline: float, most: float = math.inf) -> float:
    return min(max(deadline - time.monotonic(), 0), most)
