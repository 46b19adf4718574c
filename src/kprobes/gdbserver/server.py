"""A socket at which a debugger joins a guest that is probed, and the thread that serves it.

The session's own connection to QEMU's stub carries its requests: one stub serves both. Who stops
the guest for the debugger is whoever waits for the stub at that time, in its turn; this thread
does so while nobody else has anything to do there.
"""

import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from kprobes.errors import FormatError, KprobesError, UsageError
from kprobes.formats import rsp
from kprobes.gdbserver.client import GdbClient, LeftError
from kprobes.guest.driver import GuestDriver
from kprobes.transport.address import is_path, listen_at
from kprobes.transport.stub import Stub

_POLL_S = 0.2
_SERVE_S = 0.05
_OTHERS_S = 0.05
"""How long a stop of somebody else is left to whoever waits for it."""
_SEND_S = 10.0
_CHUNK = 1 << 16
_ACK = b"+"


class GdbServer:
    """Serves one debugger after another, until ``close`` or the end of a ``with`` block.

    Implements ``transport.stub.Debugger``.

    Attributes:
        address: where it listens, as gdb's ``target remote`` takes it.
    """

    def __init__(self, driver: GuestDriver, listen: str, warn: Callable[[str], None]) -> None:
        """Listen.

        Args:
            driver: of the guest.
            listen: the path of a socket that is made, for this user only; or, with a colon,
                ``HOST:PORT`` of this machine, which every user of it can connect to; port 0 for
                any.
            warn: is told what a debugger is refused, and why.

        Raises:
            UsageError: another machine, or nothing can be made or listened at there; or the guest
                has a server already.
        """
        self._driver, self._warn = driver, warn
        if self._stub.debugger is not None:
            raise UsageError("a debugger can join already: close that server first")
        self._listener, self.address = listen_at(listen)
        self._sock: socket.socket | None = None
        self._client: GdbClient | None = None
        self._stream = bytearray()
        self._acknowledges = True
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stub.debugger = self
        self._thread = threading.Thread(target=self._run, name="kprobes-gdbserver", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return where it listens, and whether a debugger is there."""
        state = "a debugger is attached" if self._client is not None else "no debugger"
        return f"<GdbServer at {self.address}: {state}>"

    def close(self) -> None:
        """Send the debugger away, who leaves the guest running, and listen no more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._notify()
        self._thread.join()
        self._end()
        self._stub.debugger = None
        self._listener.close()
        os.close(self._wake)
        if is_path(self.address):
            Path(self.address).unlink(missing_ok=True)

    def takes(self, reply: rsp.StopReply) -> bool:
        """Return whether the guest, which has just stopped, has stopped for the debugger."""
        if self._client is None or not self._client.takes(reply):
            return False
        self._notify()
        return True

    def pause(self, cpu: int) -> bool:
        """Hand a guest that was stopped for a trigger's hit on a vCPU over to the debugger.

        Return whether there is one.
        """
        if self._client is None:
            return False
        self._client.pause(cpu)
        self._notify()
        return True

    def serve(self, check: Callable[[], None]) -> None:
        """Do what the debugger asks for until it lets the guest run.

        Args:
            check: is called meanwhile.
        """
        # In the thread of whoever waits for the guest.
        if self._client is None:
            self._ready(timeout_s=_SERVE_S)
            check()
        while self._client is not None and self._stub.is_debugged:
            self._ready(self._sock, timeout_s=_SERVE_S)
            try:
                self._serve()
            except (ConnectionError, TimeoutError):
                self._end()
            check()

    def _run(self) -> None:
        try:
            while not (self._is_closed or self._stub.has_ended):
                try:
                    self._turn()
                except (KprobesError, OSError) as error:
                    # The guest is gone, or the debugger.
                    if not isinstance(error, ConnectionError):
                        self._warn(f"the debugger was sent away: {error}")
                    self._end()
        finally:
            self._end()

    def _turn(self) -> None:
        if self._client is None:
            if self._listener in self._ready(self._listener):
                self._accept()
            return
        stub, sock = self._stub, self._sock
        if stub.is_running:
            self._ready(sock, stub.fileno())
            if not self._poll():
                self._ready(timeout_s=_OTHERS_S)
        elif not self._client.has_stopped:
            self._ready(sock)
        # In nobody else's turn: whoever waits for the guest may serve the debugger, too.
        with stub.turn:
            self._serve()

    def _poll(self) -> bool:
        # Whether nobody else has had the guest stopped, which runs.
        with self._stub.turn:
            if self._client is not None:
                self._client.warn_covered()
                self._client.step_again()
            return self._stub.poll()

    def _serve(self) -> None:
        client = self._client
        if client is None:
            return
        if client.has_stopped and self._stub.is_debugged:
            self._send(client.stop_packet())
        self._receive()
        while (request := self._next()) is not None:
            try:
                self._do(client, request)
            except LeftError:
                self._send(b"OK")
                self._end()
                return

    def _do(self, client: GdbClient, request: bytes) -> None:
        if request == rsp.INTERRUPT:
            if not self._stub.is_debugged:
                client.interrupt()
                self._send(client.stop_packet())
            return
        if not self._stub.is_debugged:
            # It says nothing while the guest runs.
            return
        with self._stub.paused():
            answer = client.answer(request)
        if answer is not None:
            self._send(answer)
        if request == b"QStartNoAckMode":
            self._acknowledges = False

    def _accept(self) -> None:
        if self._driver.is_early:
            # It stands before its initcalls, for whoever records.
            self._ready(timeout_s=_OTHERS_S)
            return
        sock, _ = self._listener.accept()
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream.clear()
        self._acknowledges = True
        try:
            with self._stub.turn:
                self._client = GdbClient(self._driver, self._warn)
        except BaseException:
            sock.close()
            raise
        self._sock = sock

    def _receive(self) -> None:
        assert self._sock is not None
        self._sock.settimeout(0)
        with suppress(BlockingIOError):
            data = self._sock.recv(_CHUNK)
            if not data:
                raise ConnectionResetError("the debugger has hung up")
            self._stream += data

    def _next(self) -> bytes | None:
        # The next request, or an interrupt.
        try:
            found = rsp.next_request(self._stream)
        except FormatError as error:
            raise ConnectionAbortedError(str(error)) from error
        if found is None:
            return None
        del self._stream[: found.end]
        if found.payload != rsp.INTERRUPT and self._acknowledges:
            self._write(_ACK if found.is_intact else b"-")
        return found.payload if found.is_intact else self._next()

    def _send(self, payload: bytes) -> None:
        self._write(rsp.frame(payload))

    def _write(self, data: bytes) -> None:
        if self._sock is not None:
            self._sock.settimeout(_SEND_S)
            self._sock.sendall(data)

    def _end(self) -> None:
        with self._stub.turn:
            client, sock, self._client, self._sock = self._client, self._sock, None, None
            if client is not None:
                with suppress(KprobesError):
                    client.leave()
            if sock is not None:
                sock.close()

    def _ready(
        self, *files: socket.socket | int | None, timeout_s: float = _POLL_S
    ) -> Sequence[object]:
        with selectors.DefaultSelector() as selector:
            for each in (self._wake, *files):
                # Another thread may have closed it meanwhile.
                with suppress(ValueError):
                    if each is not None:
                        selector.register(each, selectors.EVENT_READ)
            found = [key.fileobj for key, _ in selector.select(timeout_s)]
        if self._wake in found:
            # Or have read it.
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return found

    def _notify(self) -> None:
        os.eventfd_write(self._wake, 1)

    @property
    def _stub(self) -> Stub:
        return self._driver.guest.stub
