"""Stopping a guest at a place when a condition holds, to look around, and letting it go on.

The vCPU that is hit waits for Python as it does for any handler; whoever waits for the breakpoint
then stops the others. If our process dies, its guardian lets the guest run.
"""

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kprobes.errors import UsageError
from kprobes.guest.upcalls import MAX_TIMEOUT_S
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.probe import Kprobe, Probe, Registrar
from kprobes.handlers.registers import Registers

if TYPE_CHECKING:
    # An extra.
    from drgn import Object, StackTrace

Condition = Callable[[Registers], object]
"""Whether a hit is one to stop at."""
_POLL_S = 0.2
"""Between looks whether the guest is still there."""


class StoppedGuest:
    """A guest that stands still at a breakpoint, until ``go`` or the end of a ``with`` block.

    Attributes:
        regs: of the vCPU that was hit, with ``args``, ``task``, ``cpu``; what is changed in them is
            what it goes on with.
    """

    def __init__(self, live: LiveKernel, regs: Registers, resume: Callable[[], None]) -> None:
        self.regs = regs
        self._live = live
        self._resume = resume

    def stack(self) -> "StackTrace":
        """Return the stack of the vCPU that was hit, as drgn walks it; UsageError without drgn."""
        return self._live.program().stack_trace(self.pt_regs())

    def pt_regs(self) -> "Object":
        """Return its registers as drgn's ``struct pt_regs``; UsageError without drgn.

        Where a function that is entered has no frame yet, and its caller is in a register only, its
        frame pointer leads to one that we show drgn: else the caller were missing.
        """
        prog = self._live.program()
        from kprobes.drgn.registers import pt_regs, with_frame

        guest, values = self._live.guest, self.regs.values_
        call, function = guest.arch.code.call, guest.kernel.symbols.at(self.regs.ip_)
        if call.link is not None and function is not None and function.addr == self.regs.ip_:
            caller = guest.arch.returns.stripped(values[call.link])
            values = with_frame(prog, values, caller)
        return pt_regs(prog, values)

    def go(self) -> None:
        """Let the guest go on; once is enough."""
        self._resume()

    def __repr__(self) -> str:
        return f"<stopped on CPU {self.regs.cpu}: {self.regs!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.go()


class Breakpoint:
    """A place at which a guest is stopped, whenever somebody waits for it.

    Hits that come while nobody does go on at once. It is there until ``close``, or the end of a
    ``with`` block, or of its session.

    Args:
        registrar: where its probe is registered.
        live: the kernel.
        place: a function, ``MODULE:FUNCTION``, ``FUNCTION+OFFSET`` or an address.
        condition: of hits; None for each.
        check: raises TargetError when the guest is gone.
    """

    def __init__(
        self,
        registrar: Registrar,
        live: LiveKernel,
        place: str,
        condition: Condition | None,
        check: Callable[[], None],
    ) -> None:
        self._live, self._condition, self._check = live, condition, check
        self._wait: _Wait | None = None
        self._paused = ExitStack()
        self._probe = Kprobe(symbol_name=place, pre_handler=self._handle, timeout_s=MAX_TIMEOUT_S)
        # A vCPU waits by the guest's time, which stands still while the guest does.
        self._probe.clock = lambda: time.monotonic() - live.guest.stub.paused_s
        registrar.register_kprobes([self._probe])

    def __repr__(self) -> str:
        """Return what it is."""
        return f"<Breakpoint at {self._probe.place}: {self._probe.hits} hits>"

    def wait(self, timeout_s: float = math.inf) -> StoppedGuest | None:
        """Return when the place is hit: the guest stands still then; or None when it was not.

        The thread that waits is the one that lets the guest go on.

        Raises:
            UsageError: it is closed, or the guest stands here already.
            TargetError: the guest is gone.
        """
        if not self._probe.is_registered:
            raise UsageError("this breakpoint is closed")
        if self._wait is not None:
            raise UsageError("the guest stands at this breakpoint: let it go on first")
        wait = self._wait = _Wait()
        try:
            self._await(wait, time.monotonic() + timeout_s)
            if wait.regs is not None:
                self._paused.enter_context(self._live.guest.stub.paused())
                return StoppedGuest(self._live, wait.regs, partial(self._let_go, wait))
        except BaseException:
            self._let_go(wait)
            raise
        self._let_go(wait)
        return None

    def close(self) -> None:
        """Let the guest go on, and take the breakpoint away; once is enough."""
        if self._wait is not None:
            self._let_go(self._wait)
        if self._probe.is_registered:
            self._probe.unregister()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _await(self, wait: "_Wait", deadline: float) -> None:
        while (left_s := deadline - time.monotonic()) > 0:
            if wait.came.wait(min(left_s, _POLL_S)):
                return
            self._check()

    def _let_go(self, wait: "_Wait") -> None:
        if self._wait is not wait:
            # It went long ago, and the guest may stand here anew.
            return
        self._wait = None
        wait.goes.set()
        self._paused.close()

    def _handle(self, probe: Probe, regs: Registers) -> bool:
        # In the thread that answers vCPUs; this one waits for the answer.
        del probe
        wait = self._wait
        if wait is None or (self._condition is not None and not self._condition(regs)):
            return False
        wait.regs = regs
        wait.came.set()
        # At once if nobody waits any more.
        wait.goes.wait()
        return regs.pc_ in regs.changed_


class _Wait:
    # One wait for a hit, by its own thread and the one that answers vCPUs.
    def __init__(self) -> None:
        self.regs: Registers | None = None
        self.came, self.goes = threading.Event(), threading.Event()
