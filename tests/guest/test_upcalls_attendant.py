"""The attendant: it answers whoever waits, comes back after being slow, and leaves in order."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from kprobes.guest.upcalls import UpcallServer
from kprobes.model.upcall import Upcall, UpcallGroup, WaitingVcpu
from kprobes.units import Addr
from tests.build.callers import REGISTERS, SP, Callers
from tests.build.waiting import PATIENCE_S, becomes_true


def _group(serve: Callable[[WaitingVcpu], None], number: int = 1) -> UpcallGroup:
    upcall = Upcall(number=number, addr=Addr(0x1000), is_after=False, serve=serve)
    return UpcallGroup(number=number, upcalls=(upcall,), copies={})


def _until(event: threading.Event) -> Callable[[WaitingVcpu], None]:
    def serve(_: WaitingVcpu) -> None:
        event.wait(PATIENCE_S)

    return serve


@contextmanager
def _attended(callers: Callers, *groups: UpcallGroup) -> Generator[UpcallServer]:
    server = UpcallServer(callers.mailbox, {each.number: each for each in groups})
    try:
        yield server
    finally:
        server.stop()


def test_whoever_asks_is_served_by_the_upcall_that_it_names() -> None:
    callers, seen = Callers(), list[tuple[str, int]]()
    one = _group(lambda w: seen.append(("one", w.cpu)))
    two = _group(lambda w: seen.append(("two", w.cpu)), number=2)

    with _attended(callers, one, two) as server:
        assert callers.wait_for(0, callers.ask(0, upcall=2))
        assert callers.wait_for(4, callers.ask(4, upcall=1))

    assert seen == [("two", 0), ("one", 1)]
    assert server.served == 2


def test_changed_registers_come_back_and_the_others_as_they_were() -> None:
    callers = Callers()

    def change(waiting: WaitingVcpu) -> None:
        waiting.registers |= {"ax": 0x1234, "ip": 0x5678, "sp": SP + 8}

    with _attended(callers, _group(change)):
        assert callers.wait_for(0, callers.ask(0))

    expected = {name: n for n, name in enumerate(REGISTERS)}
    assert callers.answer(0) == expected | {"ax": 0x1234, "ip": 0x5678, "sp": SP + 8}


def test_a_stack_pointer_that_would_go_down_stays() -> None:
    callers = Callers()

    def lower(waiting: WaitingVcpu) -> None:
        waiting.registers["sp"] -= 8

    with _attended(callers, _group(lower)):
        assert callers.wait_for(0, callers.ask(0))

    assert callers.answer(0)["sp"] == SP


def test_a_question_for_nobody_is_answered_with_nothing_changed() -> None:
    callers = Callers()

    with _attended(callers):
        assert callers.wait_for(0, callers.ask(0, upcall=0xFFFF_FFFF_FFFF))

    assert callers.answer(0)["ax"] == REGISTERS.index("ax")


def test_after_a_slow_handler_let_one_give_up_the_next_is_served() -> None:
    callers, begun, slow = Callers(), threading.Event(), threading.Event()

    def serve(waiting: WaitingVcpu) -> None:
        del waiting
        begun.set()
        slow.wait(PATIENCE_S)

    with _attended(callers, _group(serve)):
        callers.ask(0)
        assert begun.wait(PATIENCE_S)
        callers.give_up(0)
        assert not callers.is_anyone_there
        slow.set()
        assert becomes_true(lambda: callers.is_anyone_there)

        assert callers.wait_for(0, callers.ask(0))


def test_who_gave_up_before_its_turn_is_not_served() -> None:
    callers, slow, seen = Callers(), threading.Event(), list[int]()

    def serve(waiting: WaitingVcpu) -> None:
        seen.append(waiting.cpu)
        slow.wait(PATIENCE_S)

    with _attended(callers, _group(serve)):
        first = callers.ask(0)
        assert becomes_true(lambda: seen)
        callers.ask(4)
        callers.give_up(4)
        slow.set()
        assert callers.wait_for(0, first)
        time.sleep(0.02)

    assert seen == [0]


def test_who_asks_while_it_stops_still_gets_an_answer_and_then_nobody_waits() -> None:
    callers, begun, slow = Callers(), threading.Event(), threading.Event()

    def serve(waiting: WaitingVcpu) -> None:
        del waiting
        begun.set()
        slow.wait(PATIENCE_S)

    groups = {1: _group(serve), 2: _group(lambda _: None, number=2)}
    server = UpcallServer(callers.mailbox, groups)
    callers.ask(0)
    # Before that, stopping would find nobody to wait for.
    assert begun.wait(PATIENCE_S)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    seq = callers.ask(3, upcall=2)

    slow.set()

    assert callers.wait_for(3, seq)
    stopping.join()
    assert not callers.is_anyone_there


def test_a_handler_that_does_not_end_is_left_behind_and_not_heard() -> None:
    callers, never = Callers(), threading.Event()
    server = UpcallServer(callers.mailbox, {1: _group(_until(never))})
    callers.ask(0)
    time.sleep(0.05)

    server.stop()

    with _attended(callers, _group(lambda _: None)):
        callers.give_up(0)
        never.set()
        seq = callers.ask(0)
        assert callers.wait_for(0, seq)
        assert server.served == 0


def test_it_may_be_stopped_by_a_handler() -> None:
    callers, made = Callers(), list[UpcallServer]()
    made.append(UpcallServer(callers.mailbox, {1: _group(lambda _: made[0].stop())}))

    callers.ask(0)
    assert becomes_true(lambda: not callers.is_anyone_there)

    assert callers.answered(0) == 0
