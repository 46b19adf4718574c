"""The first words on a connection: is it a gdb stub at all, and is anybody there?"""

import socket

from kprobes.errors import UnreachableError
from kprobes.formats import rsp
from kprobes.transport.wire import Wire

# The empty packet ends a half one: QEMU keeps what a client that was killed in the middle of a
# packet has sent, and takes the next client's first words for the rest of it.
_HELLO = rsp.frame(b"") + rsp.frame(b"qSupported:xmlRegisters=i386,arm")
_CLOSED = "closed the connection: not a gdb stub?"
# A process must be named where an earlier client asked for multiprocess: QEMU remembers that.
DETACH = b"D;1"
# To a stub that does not answer now but may later (SIGSTOP, a queue): whether the guest runs or
# is stopped by then, it runs afterwards.
FAREWELL = rsp.INTERRUPT + rsp.frame(DETACH)


def say_hello(sock: socket.socket, address: str, *, timeout_s: float) -> bytes:
    """Send a stub's first request and return the first byte of what comes, without taking it.

    A connection that QEMU has only queued, behind another client, brings nothing.

    Raises:
        UnreachableError: nothing came, or the connection was closed.
    """
    try:
        sock.settimeout(timeout_s)
        sock.sendall(_HELLO)
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
        "the stub is already in use by another debugger, or it is not a gdb stub"
    )


def _forsake(sock: socket.socket) -> None:
    # QEMU takes a queued client up when the one before leaves, and stops the guest for it, even
    # when we are gone by then; what we sent is still read and must leave the guest running.
    Wire(sock, timeout_s=0.1).close(FAREWELL)
