"""Packets over a connected socket: requests out, answers in, each in its time.

The first words on a connection: is it a gdb stub at all, and is anybody there?
"""

import contextlib
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Generator, Sequence

from kprobes.errors import FormatError, GuestGoneError, MemoryFault, TargetError, UnreachableError
from kprobes.formats import rsp
from kprobes.units import MIB

MAX_OUTPUT = 16 * MIB
"""Bytes of console text that one answer may bring."""
_BATCH = 64
"""Requests in one write. Two batches are under way at most: QEMU's main loop blocks while its
answers are not read, and a few hundred small ones fill a unix socket."""
_ACK = b"+"
_THREAD = b"qC"
"""A request whose answer begins like no other's."""
_SLOW = 5
"""After such a part of the timeout an answer may have been lost."""
_TRIES = 3
_CHUNK = 256 * 1024
_log = logging.getLogger("kprobes.wire")


class Wire:
    """A stream of packets with one client at this end.

    We never acknowledge: QEMU takes the next packet for an acknowledgement, and a ``+`` that
    reaches a running guest would stop it.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float) -> None:
        self.sock = sock
        self.timeout_s = timeout_s
        self._stream = bytearray()
        # Answers to requests that were sent: more than 0 between requests only after an
        # exception (Ctrl-C) in the middle of one. They are read and dropped before the next.
        self._owed = 0
        # Requests that were sent before one that tells whether they are lost; 0 without it.
        self._marked = 0
        self._gone = ""
        self.has_ended = False
        """Whether the other end hung up, or said that the guest has ended."""
        self.has_stopped = False
        """Whether a request has stopped the guest, which somebody else had let run meanwhile."""

    @property
    def is_gone(self) -> bool:
        """Whether the other end hung up, fell silent or talked nonsense."""
        return bool(self._gone)

    @property
    def is_readable(self) -> bool:
        """Whether something has come that was not read."""
        return bool(self._stream) or bool(select.select([self.sock], [], [], 0)[0])

    def ask(self, payload: bytes, *, output: list[bytes] | None = None) -> bytes:
        """Send one request and return its answer.

        Args:
            payload: of the request.
            output: gets the console packets that come before the answer.

        Raises:
            GuestGoneError: no answer in time, or the connection is closed.
            FormatError: an answer that is not a packet.
        """
        for _ in range(_TRIES):
            answer = self._ask(payload, output)
            if answer is not None and (not rsp.is_stop(answer) or payload == b"?"):
                return answer
            # Somebody else (a monitor's "cont") had resumed the guest: our packet's first byte
            # stopped it and the rest was not understood. QEMU says so before 8.1, then nothing.
            self.has_stopped = True
        raise self._lost("somebody else lets the guest run whenever it is stopped")

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Send many requests without waiting for each, and return their answers in order.

        Raises:
            GuestGoneError, FormatError: as for ``ask``.
            TargetError: somebody else has let the guest run meanwhile, so that one was lost.
        """
        if len(payloads) == 1:
            return [self.ask(payloads[0])]
        self._take_owed()
        self._marked = 0
        answers: list[bytes] = []
        for start in range(0, len(payloads) + _BATCH, _BATCH):
            batch = payloads[start : start + _BATCH]
            self._send(batch)
            due = min(start, len(payloads))
            while len(answers) < due:
                found = self._plain_oks(due - len(answers))
                answers += found or self._next_of(len(answers), start + len(batch))
        if any(answer != b"OK" and rsp.is_stop(answer) for answer in answers):
            raise self._resumed()
        return answers

    def send(self, payload: bytes) -> None:
        """Send a packet that is answered much later, if ever."""
        self._take_owed()
        self._write(rsp.frame(payload))

    def interrupt(self) -> None:
        """Stop a running guest; its stop reply comes through ``receive``."""
        self._write(rsp.INTERRUPT)

    def halt(self) -> bool:
        """Stop a guest of which nobody knows whether it runs; return whether it did."""
        self._take_owed()
        self._owed += 1
        # QEMU drops what comes before its last packet is acknowledged, but for a new one's "$",
        # which would stop the guest and be lost. One that stands drops both bytes, and answers.
        self._write(_ACK + rsp.INTERRUPT + rsp.frame(_THREAD))
        was_running = False
        while rsp.is_stop(self._answer(None)):
            self._owed += 1
            was_running = True
        return was_running

    def receive(self, timeout_s: float, *, is_answer: bool = False) -> bytes | None:
        """Return the next packet, or None when none came in time.

        Args:
            timeout_s: for it.
            is_answer: whether it answers a request, or is console text before an answer.

        Raises:
            GuestGoneError: the connection is closed, or the guest ended.
            FormatError: no packet, or one with a wrong checksum.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            packet = self._next(is_answer=is_answer)
            if packet is None:
                if not self._fill(deadline - time.monotonic()):
                    return None
            elif packet.is_intact:
                return self._living(packet.payload)
            else:
                # Sockets damage nothing, so this is not a gdb stub, or one gone mad; and QEMU can
                # repeat only its last packet, which is another when many are under way.
                raise self._broken("a packet with a wrong checksum")

    def until(self, deadline: float, *, is_answer: bool = False) -> Generator[bytes]:
        """Yield packets that come before a time, the first also when it has come already.

        Args:
            deadline: by ``time.monotonic``.
            is_answer: as for ``receive``.

        Raises:
            GuestGoneError, FormatError: as for ``receive``.
        """
        while True:
            packet = self.receive(deadline - time.monotonic(), is_answer=is_answer)
            if packet is None:
                return
            yield packet
            if time.monotonic() > deadline:
                return

    def close(self, *parting: bytes) -> None:
        """Close the connection; ``parting`` is sent as it is, if that can be done at once."""
        self._gone = self._gone or "closed"
        with contextlib.suppress(OSError):
            self.sock.settimeout(0.1)
            self.sock.sendall(b"".join(parting))
        self.sock.close()

    def _ask(self, payload: bytes, output: list[bytes] | None) -> bytes | None:
        # None where the request was lost.
        self._take_owed()
        self._send((payload,))
        answer = self._answer_within(self.timeout_s / _SLOW, output)
        if answer is not None:
            return answer
        # Slow, or lost: answers come in their order.
        self._send((_THREAD,))
        answer = self._answer(output)
        if not answer.startswith(b"QC"):
            return answer
        self._owed = max(self._owed - 1, 0)
        return None

    def _next_of(self, count: int, sent: int) -> list[bytes]:
        # The next answer to many requests, after so many, when so many were sent. None is lost if
        # all come before that to a request that is sent when they are slow.
        answer = self._answer_within(self.timeout_s / _SLOW, None)
        if answer is None:
            if not self._marked:
                self._send((_THREAD,))
                self._marked = sent
            answer = self._answer(None)
        if not answer.startswith(b"QC"):
            return [answer]
        if count < self._marked:
            self._owed = 0
            raise self._resumed()
        self._marked = 0
        return []

    def _resumed(self) -> TargetError:
        self.has_stopped = True
        return TargetError("the guest was resumed by somebody else in the middle of a request")

    def _take_owed(self) -> None:
        is_asked = False
        while self._owed:
            answer = self._answer_within(self.timeout_s / _SLOW, None)
            if answer is None and is_asked:
                # Never sent, for an interrupt came before.
                self._owed = 0
            elif answer is None:
                # Slow, or never sent. The question may be under way already.
                self._send((_THREAD,))
                while not self._answer(None).startswith(b"QC"):
                    pass
                is_asked = True

    def _send(self, payloads: Sequence[bytes]) -> None:
        if payloads:
            self._owed += len(payloads)
            self._write(b"".join(map(rsp.frame, payloads)))

    def _plain_oks(self, most: int) -> list[bytes]:
        # Thousands come in a row while a guest stands still: they are not taken apart one by one.
        # QEMU acknowledges each request first.
        packet = _ACK + rsp.OK if self._stream.startswith(_ACK) else rsp.OK
        size, count = len(packet), 0
        while count < most and self._stream.startswith(packet, size * count):
            count += 1
        owed = max(self._owed - count, 0)
        # As in ``_next``.
        del self._stream[: size * count]
        self._owed = owed
        return [b"OK"] * count

    def _answer(self, output: list[bytes] | None) -> bytes:
        answer = self._answer_within(self.timeout_s, output)
        if answer is None:
            raise self._lost(f"the gdb stub did not answer within {self.timeout_s:g} s")
        return answer

    def _answer_within(self, timeout_s: float, output: list[bytes] | None) -> bytes | None:
        room = MAX_OUTPUT
        for payload in self.until(time.monotonic() + timeout_s, is_answer=True):
            if not rsp.is_output(payload):
                return payload
            room -= len(payload)
            if room < 0:
                raise self._broken(f"more than {MAX_OUTPUT} bytes of console text")
            if output is not None:
                output.append(payload)
        return None

    def _next(self, *, is_answer: bool) -> rsp.Packet | None:
        try:
            packet = rsp.next_packet(self._stream)
        except FormatError as e:
            self._gone = self._gone or str(e)
            raise
        if packet is not None:
            _log.debug("< %r", packet.payload)
            is_owed = is_answer and self._owed > 0 and not rsp.is_output(packet.payload)
            # An interrupt comes where something is called: before both of these, or after.
            del self._stream[: packet.end]
            self._owed -= is_owed
        return packet

    def _fill(self, timeout_s: float) -> bool:
        self._check()
        try:
            # 0 would make the socket non-blocking, which raises another error.
            self.sock.settimeout(max(timeout_s, 1e-4))
            before = len(self._stream)
            # All in C: between one call and the next an interrupt would lose what has come.
            deque(map(self._stream.extend, map(self.sock.recv, (_CHUNK,))), maxlen=0)
        except TimeoutError:
            return False
        except OSError as e:
            raise self._ended(f"the gdb stub hung up: {e.strerror}") from e
        if len(self._stream) == before:
            raise self._ended("the gdb stub hung up: the guest has ended")
        return True

    def _write(self, data: bytes) -> None:
        self._check()
        _log.debug("> %r", data)
        try:
            self.sock.settimeout(self.timeout_s)
            self.sock.sendall(data)
        except TimeoutError as e:
            raise self._lost(f"the gdb stub took nothing for {self.timeout_s:g} s") from e
        except OSError as e:
            raise self._ended(f"the gdb stub hung up: {e.strerror}") from e

    def _living(self, payload: bytes) -> bytes:
        if rsp.is_exit(payload):
            raise self._ended("the guest has ended")
        return payload

    def _check(self) -> None:
        if self._gone:
            raise GuestGoneError(self._gone)

    def _ended(self, why: str) -> GuestGoneError:
        self.has_ended = True
        return self._lost(why)

    def _lost(self, why: str) -> GuestGoneError:
        self._gone = why
        return GuestGoneError(why)

    def _broken(self, why: str) -> FormatError:
        # Which answer belongs to which request is no longer known.
        self._gone = f"the gdb stub sent {why}"
        return FormatError(self._gone)


def check_ok(answer: bytes, request: str) -> None:
    """Raise TargetError unless a request was answered with OK."""
    if answer != b"OK":
        words = answer[:64].decode("ascii", "replace") or "not supported"
        raise TargetError(f"the gdb stub refused {request}: {words}")


def memory_fault(span: tuple[int, int], answer: bytes, verb: str) -> MemoryFault:
    """Return the fault that an answer to a memory request stands for.

    Args:
        span: the first address, and the bytes that were asked for.
        answer: the stub's.
        verb: ``read`` or ``write``.
    """
    words = answer[:32].decode("ascii", "replace")
    return MemoryFault(*span, f"the gdb stub answered {words!r}", verb=verb)


# The empty packet ends a half one: QEMU keeps what a client that was killed in the middle of a
# packet has sent, and takes the next client's first words for the rest of it.
_HANDSHAKE = rsp.frame(b"") + rsp.frame(b"qSupported:xmlRegisters=i386,arm")
_CLOSED = "closed the connection: not a gdb stub?"
# A process must be named where an earlier client asked for multiprocess: QEMU remembers that.
DETACH = b"D;1"
# To a stub that does not answer now but may later (SIGSTOP, a queue): whether the guest runs or
# is stopped by then, it runs afterwards.
FAREWELL = rsp.INTERRUPT + rsp.frame(DETACH)


def handshake(sock: socket.socket, address: str, *, timeout_s: float) -> bytes:
    """Send a stub's first request and return the first byte of what comes, without taking it.

    A connection that QEMU has only queued, behind another client, brings nothing.

    Args:
        sock: connected; it is closed where this fails.
        address: of the stub, for errors.
        timeout_s: for the answer.

    Raises:
        UnreachableError: nothing came, or the connection was closed.
    """
    try:
        sock.settimeout(timeout_s)
        sock.sendall(_HANDSHAKE)
        first = sock.recv(1, socket.MSG_PEEK)
    except TimeoutError as e:
        _forsake(sock)
        raise UnreachableError(_silence(address, timeout_s)) from e
    except OSError as e:
        sock.close()
        raise UnreachableError(f"{address}: {_CLOSED}") from e
    except BaseException:
        _forsake(sock)
        raise
    if not first:
        sock.close()
        raise UnreachableError(f"{address}: {_CLOSED}")
    return first


def _silence(address: str, timeout_s: float) -> str:
    return (
        f"{address}: no answer within {timeout_s:g} s: "
        "the stub is in use by another debugger or kprobe command, or it is not a gdb stub"
    )


def _forsake(sock: socket.socket) -> None:
    # QEMU takes a queued client up when the one before leaves, and stops the guest for it, even
    # when we are gone by then; what we sent is still read and must leave the guest running.
    Wire(sock, timeout_s=0.1).close(FAREWELL)
