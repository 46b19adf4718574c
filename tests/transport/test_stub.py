# pyright: reportPrivateUsage=false
# A clock, and requests that were interrupted, are put in from below.
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from kprobes.errors import FormatError, GuestGoneError, TargetError, UnreachableError
from kprobes.guest.stops import run_until_stop
from kprobes.transport.stub import Stub
from tests.build.stub import FakeStub, listening, packet, send
from tests.build.stub_client import opened
from tests.build.waiting import becomes_true


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("announces", [True, False])
def test_connecting_needs_no_stop_packet(is_running: bool, announces: bool) -> None:
    fake = FakeStub(is_running=is_running, announces=announces)

    with opened(fake) as stub:
        assert (stub.is_running, stub.stops) == (False, 1)
        assert stub.ids() == (1, 2)

    assert fake.is_running


@pytest.mark.parametrize("has_no_ack", [True, False])
@pytest.mark.parametrize("is_split", [True, False])
def test_every_way_of_answering_is_understood(has_no_ack: bool, is_split: bool) -> None:
    fake = FakeStub(has_no_ack=has_no_ack, is_split=is_split)

    with opened(fake) as stub:
        assert stub.read(0x100, 0x500) == bytes(fake.virtual[0x100:0x600])
        assert stub.description.architecture == "i386:x86-64"
        assert stub.monitor("info }#$*") == "ran: info }#$*\n"


def test_connecting_clears_what_a_killed_client_left() -> None:
    fake = FakeStub(is_physical=True)

    with opened(fake):
        pass

    assert not fake.is_physical


def test_breakpoints_that_a_killed_client_left_are_taken_from_each_vcpu() -> None:
    fake = FakeStub(cpus=3)

    with opened(fake):
        pass

    # QEMU takes them from the chosen vCPU, and goes on with the one that is chosen last.
    asked = [each for each in fake.asked if each == b"?" or each.startswith(b"Hc")]
    assert asked == [b"Hc3", b"?", b"Hc2", b"?", b"Hc1", b"?"]


def test_the_guest_runs_stops_and_its_pauses_are_counted() -> None:
    now = iter(range(100))
    with listening(FakeStub()) as path, Stub.open(path) as stub:
        stub._clock = lambda: float(next(now))
        stub._stopped_at = 0.0

        next(now)
        stub.resume()
        assert stub.is_running
        assert (stub.stop().signal, stub.is_running, stub.stops) == (2, False, 2)
        stub.resume()

        assert stub.paused_s == 2.0


def test_a_breakpoint_is_waited_for() -> None:
    fake = FakeStub()
    hit = threading.Event()

    def run_into_it(sock: socket.socket) -> None:
        fake.is_running = True
        hit.wait(5)
        fake.stop(sock, b"T05thread:02;")

    fake.hooks[b"vCont;c"] = run_into_it
    with opened(fake) as stub:
        stub.insert_breakpoint(0xFFFFFFFF81000000)
        assert fake.breakpoints == {0xFFFFFFFF81000000}
        stub.resume()
        assert stub.wait(0.02) is None
        hit.set()
        reply = stub.wait(5)

        assert reply is not None
        assert (reply.signal, reply.cpu, stub.is_running, stub.stops) == (5, 2, False, 2)
        stub.remove_breakpoint(0xFFFFFFFF81000000)
        stub.remove_breakpoint(0xFFFFFFFF81000000)

    assert fake.breakpoints == set()


def test_a_breakpoint_of_the_cpu_is_asked_for_and_taken_away_as_such() -> None:
    fake = FakeStub()

    with opened(fake) as stub:
        stub.insert_breakpoint(0x1000, is_hardware=True)
        stub.remove_breakpoint(0x1000)

    assert [each for each in fake.asked if each[:1] in (b"Z", b"z")] == [b"Z1,1000,1", b"z1,1000,1"]


def test_detaching_removes_breakpoints_and_resumes() -> None:
    fake = FakeStub()

    with opened(fake) as stub:
        stub.insert_breakpoint(0x1000)

    assert (fake.breakpoints, fake.is_running) == (set(), True)


@pytest.mark.parametrize("status", ["finish-migrate", "postmigrate"])
def test_a_guest_that_was_migrated_while_it_stood_does_not_run_here_again(status: str) -> None:
    said = f"VM status: paused ({status})\r\n".encode().hex().encode()
    fake = FakeStub()
    with opened(fake) as stub:
        stub.resume()
        with stub.paused():
            stub.insert_breakpoint(0x1000)
            fake.hooks[b"qRcmd,"] = send(packet(b"O" + said) + packet(b"OK"))

        assert (stub.is_running, stub.is_held, stub.has_migrated()) == (False, True, True)

    assert (fake.breakpoints, fake.is_running) == (set(), False)


@pytest.mark.parametrize("answer", [b"E01", b""])
def test_a_stub_that_does_not_tell_lets_a_guest_run(answer: bytes) -> None:
    fake = FakeStub(answers={b"qRcmd,": answer})

    with opened(fake) as stub:
        stub.resume()
        assert stub.is_running


def test_a_stub_that_does_not_answer_in_time_is_asked_nothing_more() -> None:
    fake = FakeStub()
    with listening(fake) as path:
        stub = Stub.open(path, timeout_s=0.2)
        fake.hooks[b"qRcmd,"] = send(b"")

        with pytest.raises(GuestGoneError):
            stub.resume()

        assert b"vCont;c" not in fake.asked
        stub.close()


def test_a_guest_that_was_migrated_is_not_let_run_by_detaching() -> None:
    said = b"VM status: paused (postmigrate)\r\n".hex().encode()
    fake = FakeStub()

    with opened(fake):
        fake.hooks[b"qRcmd,"] = send(packet(b"O" + said) + packet(b"OK"))

    assert not fake.is_running


def test_detaching_can_leave_the_guest_stopped_without_breakpoints() -> None:
    fake = FakeStub()
    with listening(fake) as path:
        stub = Stub.open(path)
        stub.insert_breakpoint(0x1000)

        stub.detach(resume=False)

        assert (fake.breakpoints, fake.is_running) == (set(), False)


def test_the_guest_runs_after_an_error_in_the_body() -> None:
    fake = FakeStub()

    with pytest.raises(KeyError), opened(fake):
        raise KeyError

    assert fake.is_running


def test_one_step_moves_one_vcpu() -> None:
    fake = FakeStub()

    with opened(fake) as stub:
        reply = stub.step(2)

        assert (reply.cpu, stub.is_running) == (2, False)
    assert b"vCont;s:2" in fake.asked


def test_a_stub_without_vcont_is_run_by_the_old_packets() -> None:
    fake = FakeStub(answers={b"vCont?": b""})

    with opened(fake) as stub:
        stub.resume()
        assert stub.stop().signal == 2

    assert b"c" in fake.asked


def test_a_pause_inside_a_pause_resumes_once() -> None:
    with opened(FakeStub()) as stub:
        stub.resume()

        with stub.paused(), stub.paused():
            assert not stub.is_running

        assert (stub.is_running, stub.stops) == (True, 2)
        with pytest.raises(KeyError), stub.paused():
            raise KeyError
        assert (stub.is_running, stub.stops) == (True, 3)


def test_requests_to_a_running_guest_are_our_bug() -> None:
    with opened(FakeStub()) as stub:
        stub.resume()

        with pytest.raises(ValueError, match="stop it first"):
            stub.read(0, 1)
        with pytest.raises(ValueError, match="stop it first"):
            stub.write_physical(0, b"x")
        with pytest.raises(ValueError, match="stop it first"):
            stub.monitor("info status")


def test_threads_without_end_are_refused() -> None:
    fake = FakeStub(answers={b"qsThreadInfo": b"m" + b",".join([b"01"] * 300)})

    with listening(fake) as path, pytest.raises(UnreachableError, match="vCPUs"):
        Stub.open(path)


def test_both_close_and_detach_can_be_called_again() -> None:
    closed: list[int] = []
    with ExitStack() as stack:
        path = stack.enter_context(listening(FakeStub()))
        stub = Stub.open(path)
        stub._on_close = lambda: closed.append(1)

        stub.detach()
        stub.detach()
        stub.close()

    assert closed == [1]


def test_what_somebody_else_has_stopped_stays_so_until_they_let_it_run() -> None:
    fake = FakeStub()

    def paused_by_a_monitor(sock: socket.socket) -> None:
        fake.stop(sock, b"T02thread:01;")

    fake.hooks[b"vCont;c"] = paused_by_a_monitor
    with opened(fake) as stub:
        stub.resume()
        stub.wait(5)
        assert (stub.is_held, stub.stands(), fake.is_running) == (True, True, False)

        del fake.hooks[b"vCont;c"]
        fake.is_running = True
        assert (stub.stands(), stub.is_held, stub.is_running) == (False, False, True)


def test_a_stop_of_somebody_else_is_not_taken_for_ours() -> None:
    fake = FakeStub()
    fake.hooks[b"vCont;c"] = lambda sock: fake.stop(sock, b"T02thread:01;")
    with opened(fake) as stub:
        stub.resume()
        select.select([stub.fileno()], [], [], 5)

        with stub.paused():
            assert stub.ids() == (1, 2)
        pauses = stub.paused_s

        assert (stub.is_held, fake.is_running, stub.paused_s) == (True, False, pauses)
    assert not fake.is_running


def test_a_pause_inside_one_of_a_stopped_guest_asks_nothing() -> None:
    fake = FakeStub(is_running=False)
    with opened(fake) as stub:
        stub.is_held = True
        with stub.paused(), stub.paused():
            fake.asked.clear()
            assert stub.ids() == (1, 2)

    assert fake.asked[0] == b"qfThreadInfo"
    assert not fake.is_running


@pytest.mark.parametrize("request_", [b"qSupported", b"QStartNoAckMode", b"vCont?", b"D;1"])
def test_an_interrupt_on_the_way_in_or_out_lets_the_guest_run(request_: bytes) -> None:
    fake = FakeStub()

    def interrupt(sock: socket.socket) -> None:
        del sock
        fake.hooks.clear()
        os.kill(os.getpid(), signal.SIGINT)

    fake.hooks[request_] = interrupt

    def come_and_go(path: str) -> None:
        Stub.open(path).detach()

    with listening(fake) as path, pytest.raises(KeyboardInterrupt):
        come_and_go(path)

    assert fake.is_running
    assert not fake.hooks


def _interrupted(fake: FakeStub, *, is_late: bool) -> Callable[[socket.socket, bytes], None]:
    # Ctrl-C when the guest was asked to stop, before or after it says so.
    stop = fake.stop

    def stop_and_interrupt(sock: socket.socket, reply: bytes) -> None:
        setattr(fake, "stop", stop)  # noqa: B010 # a method is put in from below
        if is_late:
            stop(sock, reply)
        os.kill(os.getpid(), signal.SIGINT)
        if not is_late:
            time.sleep(0.1)
            stop(sock, reply)

    return stop_and_interrupt


@pytest.mark.parametrize("is_late", [True, False])
def test_a_guest_runs_again_after_an_interrupt_while_it_was_to_stop(*, is_late: bool) -> None:
    fake = FakeStub()
    with opened(fake) as stub:
        stub.resume()
        setattr(fake, "stop", _interrupted(fake, is_late=is_late))  # noqa: B010
        with suppress(KeyboardInterrupt), stub.paused():
            time.sleep(1)
        time.sleep(0.2)

        with stub.paused():
            assert stub.ids() == (1, 2)

        assert (stub.is_held, stub.is_running) == (False, True)
        assert becomes_true(lambda: fake.is_running)


@pytest.mark.parametrize("has_come", [False, True], ids=["nothing has come", "half has come"])
def test_a_guest_runs_again_after_an_interrupt_when_it_was_to_run(*, has_come: bool) -> None:
    fake = FakeStub()

    def interrupt(sock: socket.socket) -> None:
        fake.hooks.clear()
        # Whoever asks waits for the answer by then.
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        answer = packet(b"OK")
        sock.sendall(answer[:2])
        time.sleep(0.05)
        sock.sendall(answer[2:])

    with opened(fake) as stub:
        stub.resume()
        fake.hooks[b"qRcmd,"] = interrupt

        # Another thread takes the signal then, and this one hears of it when it has some bytes.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT] if has_come else [])
        try:
            with pytest.raises(KeyboardInterrupt), stub.paused():
                pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        assert stub.is_running
        assert becomes_true(lambda: fake.is_running)


def test_what_somebody_else_stops_in_a_pause_of_ours_stays_so() -> None:
    fake = FakeStub()
    fake.hooks[b"vCont;c"] = lambda sock: fake.stop(sock, b"T02thread:01;")
    with opened(fake) as stub:
        fake.is_running = True
        stub.is_running = True

        with pytest.raises(TargetError, match="paused"), stub.paused():
            run_until_stop(stub, time.monotonic() + 5)

        assert (stub.is_held, fake.is_running) == (True, False)


def _flood(payload: bytes) -> Callable[[socket.socket], None]:
    def send(sock: socket.socket) -> None:
        # Until the client hangs up.
        while True:
            sock.sendall(packet(payload) * 100)

    return send


@pytest.mark.parametrize("request_", [b"qSupported", b"?", b"vCont?"])
@pytest.mark.parametrize("payload", [b"T05thread:01;", b"O", b""])
def test_packets_without_end_have_a_deadline(request_: bytes, payload: bytes) -> None:
    fake = FakeStub(hooks={request_: _flood(payload)})

    with listening(fake) as path, suppress(UnreachableError, GuestGoneError, TargetError):
        Stub.open(path, timeout_s=0.3).close()


def test_a_guest_that_is_to_stop_and_never_says_so_has_a_deadline() -> None:
    class Endless(FakeStub):
        def stop(self, sock: socket.socket, reply: bytes) -> None:
            del reply
            _flood(b"OK")(sock)

    with listening(Endless(is_running=False)) as path:
        stub = Stub.open(path, timeout_s=0.3)
        stub.resume()

        with pytest.raises(GuestGoneError, match="did not stop within"):
            stub.stop()
        stub.close()


def test_vcpus_and_files_without_end_have_a_deadline() -> None:
    vcpus = FakeStub(hooks={b"qsThreadInfo": _slowly(b"m02")})
    with listening(vcpus) as path, pytest.raises(UnreachableError, match="vCPUs"):
        Stub.open(path, timeout_s=0.3)

    with listening(FakeStub(hooks={b"qXfer": _slowly(b"m ")})) as path:
        stub = Stub.open(path, timeout_s=0.3)
        with pytest.raises(FormatError, match="has no end"):
            _ = stub.description.architecture
        stub.close()


def _slowly(payload: bytes) -> Callable[[socket.socket], None]:
    def send(sock: socket.socket) -> None:
        time.sleep(0.01)
        sock.sendall(packet(payload))

    return send
