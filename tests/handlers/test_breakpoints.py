"""Waiting for a breakpoint, with the thread that answers vCPUs played by the test."""

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest
from msgspec.structs import replace

from kprobes.errors import TargetError, UsageError
from kprobes.handlers.breakpoints import Breakpoint
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.probe import Probe
from kprobes.handlers.registers import Registers
from kprobes.handlers.registry import Registry
from kprobes.transport.stub import Stub
from tests.build.handled import make_handled
from tests.handlers.test_registry import FakeEngine

_WAIT_S = 60


def _never(regs: Registers) -> bool:
    del regs
    return False


class Pauses:
    """The stub as far as it stops and lets run."""

    def __init__(self) -> None:
        self.depth = 0
        self.paused_s = 0.0

    @contextmanager
    def paused(self) -> Generator[None]:
        self.depth += 1
        yield
        self.depth -= 1


class Scene:
    """A breakpoint, and hits of it."""

    def __init__(
        self,
        condition: Callable[[Registers], object] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.pauses, self.engine, handled = Pauses(), FakeEngine(), make_handled()
        guest = replace(handled.live.guest, stub=cast(Stub, self.pauses))
        live = LiveKernel(lambda: guest)
        self._registry, self._vcpu = Registry(self.engine, live), handled.vcpu()
        self.point = Breakpoint(self, live, "vfs_read", condition, check)

    def register_kprobes(self, probes: Sequence[Probe]) -> None:
        self._registry.register(probes)

    def hit(self) -> threading.Thread:
        """Have the place be hit; the thread ends when the vCPU goes on."""
        (upcall,) = self.engine.armed
        thread = threading.Thread(target=upcall.serve, args=(self._vcpu,), daemon=True)
        thread.start()
        return thread

    def goes_on(self, vcpu: threading.Thread) -> bool:
        vcpu.join(_WAIT_S)
        return not vcpu.is_alive()

    def hit_while_waited(self) -> queue.Queue[threading.Thread]:
        """Have it be hit as soon as somebody waits for it; return what gets the vCPU's thread."""
        hits = queue.Queue[threading.Thread]()
        threading.Timer(0.05, lambda: hits.put(self.hit())).start()
        return hits


def test_a_guest_stands_from_the_hit_until_it_is_let_go() -> None:
    scene = Scene()
    hits = scene.hit_while_waited()

    stopped = scene.point.wait(_WAIT_S)

    assert stopped is not None
    assert scene.pauses.depth == 1
    vcpu = hits.get(timeout=_WAIT_S)
    assert vcpu.is_alive()
    with stopped:
        assert stopped.regs.cpu == 1
    assert scene.pauses.depth == 0
    assert scene.goes_on(vcpu)
    stopped.go()


def test_a_hit_that_nobody_waits_for_goes_on() -> None:
    scene = Scene()

    assert scene.goes_on(scene.hit())
    assert scene.pauses.depth == 0


def test_a_hit_that_the_condition_is_not_true_of_goes_on() -> None:
    scene = Scene(_never)
    hits = scene.hit_while_waited()

    assert scene.point.wait(1) is None
    assert scene.goes_on(hits.get(timeout=_WAIT_S))


def test_a_hit_after_the_wait_goes_on() -> None:
    is_over = threading.Event()
    scene = Scene(lambda _: is_over.wait(_WAIT_S))
    hits = scene.hit_while_waited()

    # Its condition was asked while it was waited for, and answers when it is no more.
    assert scene.point.wait(0.5) is None
    is_over.set()

    assert scene.goes_on(hits.get(timeout=_WAIT_S))
    assert scene.pauses.depth == 0


def test_a_guest_that_is_gone_ends_the_wait() -> None:
    def check() -> None:
        raise TargetError("the guest is gone")

    scene = Scene(check=check)

    with pytest.raises(TargetError, match="gone"):
        scene.point.wait(_WAIT_S)
    assert scene.goes_on(scene.hit())


def test_closing_lets_the_guest_go_and_takes_the_probe_away() -> None:
    scene = Scene()
    hits = scene.hit_while_waited()
    stopped = scene.point.wait(_WAIT_S)
    assert stopped is not None
    with pytest.raises(UsageError, match="let it go on first"):
        scene.point.wait()

    scene.point.close()

    assert scene.goes_on(hits.get(timeout=_WAIT_S))
    assert scene.pauses.depth == 0
    assert scene.engine.armed == []
    with pytest.raises(UsageError, match="closed"):
        scene.point.wait()


def test_a_stop_of_long_ago_does_not_let_a_later_one_go() -> None:
    scene = Scene()
    scene.hit_while_waited()
    first = scene.point.wait(_WAIT_S)
    assert first is not None
    first.go()
    scene.hit_while_waited()
    second = scene.point.wait(_WAIT_S)
    assert second is not None

    first.go()

    assert scene.pauses.depth == 1
    second.go()
    assert scene.pauses.depth == 0
