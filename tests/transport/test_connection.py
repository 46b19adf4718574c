# pyright: reportPrivateUsage=false
# A clock, and requests that were interrupted, are put in from below.
import socket
import time
from collections.abc import Callable

import pytest

from kprobes.errors import FormatError, GuestGoneError, TargetError
from kprobes.formats import rsp
from kprobes.transport.connection import Wire
from tests.build.stub import FakeStub, hang_up, packet, send, silence
from tests.build.stub_client import abandoned, opened


@pytest.mark.parametrize("has_no_ack", [True, False])
def test_a_damaged_answer_ends_the_connection(has_no_ack: bool) -> None:
    fake = FakeStub(has_no_ack=has_no_ack)

    with abandoned(fake) as stub:
        fake.wrong_checksums = 1
        with pytest.raises(FormatError, match="checksum"):
            stub.ids()
        with pytest.raises(GuestGoneError, match="checksum"):
            stub.read(0, 1)

    assert fake.is_running


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"garbage", "no gdb packet"),
        (b"$" + b"0" * (2 << 20), "more than"),
        (packet(b"mzz"), "thread id"),
        (packet(b"mp1"), "thread id"),
    ],
)
def test_nonsense_is_a_format_error(answer: bytes, why: str) -> None:
    fake = FakeStub()

    with abandoned(fake) as stub:
        fake.hooks[b"qfThreadInfo"] = send(answer)
        with pytest.raises(FormatError, match=why):
            stub.ids()


@pytest.mark.parametrize("hook", [hang_up, send(packet(b"W00"))])
def test_a_guest_that_ends_is_gone_for_every_later_request(
    hook: Callable[[socket.socket], None],
) -> None:
    fake = FakeStub()

    with abandoned(fake) as stub:
        fake.hooks[b"qfThreadInfo"] = hook
        with pytest.raises(GuestGoneError):
            stub.ids()
        with pytest.raises(GuestGoneError):
            stub.read(0, 1)
        stub.detach()


def test_the_end_in_the_middle_of_a_packet_is_seen() -> None:
    fake = FakeStub()

    def cut(sock: socket.socket) -> None:
        sock.sendall(b"$m01,0")
        hang_up(sock)

    with abandoned(fake) as stub:
        fake.hooks[b"qfThreadInfo"] = cut
        with pytest.raises(GuestGoneError, match="hung up"):
            stub.ids()


def test_the_end_while_the_guest_runs_is_seen() -> None:
    fake = FakeStub(hooks={b"vCont;c": hang_up})

    with abandoned(fake) as stub:
        stub.resume()
        with pytest.raises(GuestGoneError):
            stub.wait(5)


def test_silence_ends_in_time_and_the_guest_is_told_to_run() -> None:
    fake = FakeStub()

    with abandoned(fake, timeout_s=0.1) as stub:
        fake.hooks |= {b"qfThreadInfo": silence, b"qC": silence}
        with pytest.raises(GuestGoneError, match=r"within 0\.1 s"):
            stub.ids()
        stub.detach()

    assert fake.asked[-1] == b"D;1"
    assert fake.is_running


def test_a_guest_that_somebody_else_resumed_is_stopped_and_asked_again() -> None:
    fake = FakeStub()

    with opened(fake) as stub:
        fake.is_running = True

        assert stub.ids() == (1, 2)


@pytest.mark.parametrize("is_silent", [False, True], ids=["says so", "says nothing"])
def test_a_guest_that_somebody_else_lets_run_in_a_request_runs_afterwards(
    *, is_silent: bool
) -> None:
    fake = FakeStub(is_silent=is_silent, is_running=False)
    with opened(fake) as stub:
        stub.is_held = True
        with stub.paused():
            fake.is_running = True
            assert [stub.read(8, 2), stub.read(9, 1)] == [b"\x08\x09", b"\x09"]
            assert not fake.is_running
        assert (stub.stands(), stub.is_held, stub.is_running) == (False, False, True)

    assert fake.is_running


def test_a_guest_that_somebody_else_lets_run_again_and_again_is_left_running() -> None:
    fake = FakeStub(is_running=False)

    def resumed(sock: socket.socket) -> None:
        fake.is_running = True
        sock.sendall(packet(b"QC01"))

    with abandoned(fake, timeout_s=1) as stub:
        stub.is_held = fake.is_silent = fake.is_running = True
        fake.hooks[b"qC"] = resumed
        with pytest.raises(GuestGoneError, match="whenever it is stopped"):
            stub.ids()
        fake.is_running = False
        stub.detach()

    assert fake.asked[-1] == b"D;1"
    assert fake.is_running


@pytest.mark.parametrize("is_silent", [False, True], ids=["says so", "says nothing"])
@pytest.mark.parametrize("count", [3, 200])
def test_one_of_many_requests_that_is_lost_is_an_error_and_the_guest_runs_afterwards(
    *, is_silent: bool, count: int
) -> None:
    fake = FakeStub(is_silent=is_silent, is_running=False)

    def resumed(sock: socket.socket) -> None:
        sock.sendall(packet(b"01"))
        fake.is_running = True

    with opened(fake, timeout_s=1) as stub:
        stub.is_held = True
        with stub.paused():
            fake.hooks[b"m1,1"] = resumed
            with pytest.raises(TargetError, match="resumed by somebody else"):
                stub._wire.exchange([b"m%x,1" % n for n in range(count)])
            del fake.hooks[b"m1,1"]
            assert stub._wire.exchange([b"m8,2", b"m9,1"]) == [b"0809", b"09"]
        assert (stub.stands(), stub.is_held, stub.is_running) == (False, False, True)

    assert fake.is_running


@pytest.mark.parametrize("slow_ones", [(1,), (1, 130), (198,), (60, 61, 62)])
def test_slow_answers_to_many_requests_are_in_their_order(slow_ones: tuple[int, ...]) -> None:
    fake = FakeStub()

    def slow(number: int) -> Callable[[socket.socket], None]:
        def answer(sock: socket.socket) -> None:
            time.sleep(0.25)
            sock.sendall(packet(b"%02x" % number))

        return answer

    with opened(fake, timeout_s=1) as stub:
        fake.hooks |= {b"m%x,1" % number: slow(number) for number in slow_ones}
        found = stub._wire.exchange([b"m%x,1" % n for n in range(200)])
        assert found == [b"%02x" % n for n in range(200)]
        assert stub.read(8, 2) == bytes([8, 9])


def test_a_slow_answer_is_waited_for_and_that_to_the_next_request_is_its_own() -> None:
    fake = FakeStub()

    def slow(sock: socket.socket) -> None:
        time.sleep(1)
        sock.sendall(packet(b"m01"))

    with opened(fake, timeout_s=4) as stub:
        fake.hooks[b"qfThreadInfo"] = slow
        assert stub.ids() == (1, 2)
        assert stub.read(8, 2) == bytes([8, 9])


def test_an_interrupted_request_does_not_shift_later_answers() -> None:
    fake = FakeStub()

    with opened(fake) as stub:
        stub._wire._send([b"qfThreadInfo", b"m0,4"])

        assert stub.read(8, 2) == bytes([8, 9])


def test_a_question_whether_one_was_lost_that_was_interrupted_shifts_no_later_answer() -> None:
    fake = FakeStub()

    def slow(sock: socket.socket) -> None:
        time.sleep(1.5)
        sock.sendall(packet(b"00000000"))

    with opened(fake) as stub:
        fake.hooks[b"m0,4"] = slow
        stub._wire._send([b"m0,4"])
        stub._wire._send([b"qC"])

        assert stub.read(8, 2) == bytes([8, 9])
        assert stub.read(16, 2) == bytes([16, 17])


def test_a_request_that_an_interrupt_came_before_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(FakeStub()) as stub:

        def interrupted(data: bytes) -> None:
            raise KeyboardInterrupt(data)

        with monkeypatch.context() as patch:
            patch.setattr(stub._wire, "_write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stub.ids()

        assert stub.ids() == (1, 2)
        assert stub.read(0, 1)


@pytest.mark.parametrize("ack", [b"", b"+"])
def test_the_answers_to_many_writes_are_not_taken_apart_one_by_one(
    monkeypatch: pytest.MonkeyPatch, ack: bytes
) -> None:
    apart = 0
    next_packet = rsp.next_packet

    def counted(stream: bytearray) -> rsp.Packet | None:
        nonlocal apart
        apart += 1
        return next_packet(stream)

    monkeypatch.setattr(rsp, "next_packet", counted)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((ack + packet(b"OK")) * 300 + ack + packet(b"E22"))

        answers = Wire(ours, timeout_s=5).exchange([b"M0,1:00"] * 301)

    assert answers == [b"OK"] * 300 + [b"E22"]
    assert apart < 10
