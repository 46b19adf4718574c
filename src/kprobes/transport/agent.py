"""Commands in the guest, by its agent (transport/guest/agent.sh), and on this machine.

A request is one line that the agent's shell evaluates:

    start ID told|quiet|held $'COMMAND'      go ID      stop ID      size ROWS COLUMNS

An answer is one line, and after ``done`` all that the command wrote:

    ready
    started ID PID
    done ID PID STATUS PACKED SIZE SENT     then SENT bytes: the output, or when PACKED is 1
                                            its gzip, which unpacks to SIZE bytes

On this machine they are children of ours, whose output is kept until they end.
"""

import ctypes
import itertools
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO, Protocol, TypeVar

from msgspec import Struct

from kprobes.errors import TargetError, UsageError

Command = str | Sequence[str]
"""A line for the guest's shell, or words that reach the command as they are."""

_T = TypeVar("_T")
# The guest's serial driver holds 64 KiB for a reader that is late, and drops what is beyond.
_LONGEST_REQUEST = 32 * 1024
_LONGEST_LINE = 200
# zlib.decompressobj: 16 means gzip's header, 15 its largest window.
_GZIP = 16 + 15
# Threads that wait for different commands take turns at reading.
_TURN_S = 0.1
_NUMBERS = {b"ready": 0, b"started": 2, b"done": 6}


class Wire(Protocol):
    """Bytes to and from the guest's agent."""

    def read(self, timeout_s: float) -> bytes:
        """Return what has come, b"" when nothing came in time, or raise GuestGoneError."""
        ...

    def write(self, data: bytes, timeout_s: float | None) -> None:
        """Send everything, or raise TargetError in time, or GuestGoneError."""
        ...


class Finished(Struct, frozen=True, kw_only=True):
    """A command that has ended.

    Attributes:
        status: as the shell counts it: 128 and the signal's number when one ended it.
        output: all that it wrote, standard error included.
        pid: that it had in the guest.
    """

    status: int
    output: bytes
    pid: int


class Job(Protocol):
    """A command that was started where the kernel runs."""

    @property
    def pid(self) -> int:
        """Its number there."""
        ...

    def wait(self, timeout_s: float | None = None) -> Finished:
        """Return its end, or raise TargetError when it does not come in time."""
        ...

    def go(self) -> None:
        """Let it begin, if it was started held."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class Commands(Protocol):
    """What runs commands where the kernel runs."""

    def run(self, command: Command, timeout_s: float | None = None) -> Finished:
        """Run one to its end, or kill it and raise TargetError when it does not end in time."""
        ...

    def start(self, command: Command, *, is_held: bool = False) -> Job:
        """Start one; if it is held it begins when it is told to go."""
        ...


class Agent:
    """The guest's agent. Threads may share it.

    Args:
        longest_output: bytes; a guest that announces more is not believed.
    """

    def __init__(self, wire: Wire, *, longest_output: int) -> None:
        self._wire = wire
        self._longest_output = longest_output
        self._ids = itertools.count(1)
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._is_ready = False
        # Only what somebody waits for is kept: id to pid, or to the end.
        self._wanted: set[int] = set()
        self._pids: dict[int, int] = {}
        self._finished: dict[int, Finished] = {}

    def wait_ready(self, timeout_s: float) -> bool:
        """Return whether the guest can run commands, waiting that long for it."""
        deadline = time.monotonic() + timeout_s
        while not self._is_ready and (left := deadline - time.monotonic()) > 0:
            self._read(left)
        return self._is_ready

    def run(self, command: Command, timeout_s: float | None = None) -> Finished:
        """Run a command to its end.

        Raises:
            TargetError: not ended in time; it is killed then.
            GuestGoneError: the guest died.
        """
        deadline = _deadline(timeout_s)
        with self._started_command(command, "quiet", deadline) as number:
            return self._end_of(number, command, deadline)

    def start(
        self, command: Command, timeout_s: float | None = None, *, is_held: bool = False
    ) -> "Running":
        """Start a command and return when its pid is known; errors as for ``run``.

        Args:
            command: what is run.
            timeout_s: for the start, and None for no limit.
            is_held: it does not begin before ``go`` is called.
        """
        deadline = _deadline(timeout_s)
        with self._started_command(command, "held" if is_held else "told", deadline) as number:
            what = "the guest did not start a command"
            pid = self._take(self._pids, number, deadline=deadline, what=what)
        return Running(self, number, command=command, pid=pid)

    def resize(self, rows: int, columns: int) -> None:
        """Tell the shell on the console how large the user's terminal is."""
        self._wire.write(b"size %d %d\n" % (rows, columns), _TURN_S)

    def go(self, number: int) -> None:
        """Let a command begin that is held."""
        self._wire.write(b"go %d\n" % number, _TURN_S)

    def stop(self, number: int) -> None:
        """Kill a command."""
        self._wire.write(b"stop %d\n" % number, _TURN_S)

    def wait(self, number: int, command: Command, timeout_s: float | None) -> Finished:
        """Return a started command's end, or raise TargetError when it does not come in time.

        Args:
            number: of the command.
            command: what was started.
            timeout_s: for its end, or None for no limit.
        """
        return self._end_of(number, command, _deadline(timeout_s))

    @contextmanager
    def _started_command(
        self, command: Command, how: str, deadline: float | None
    ) -> Generator[int]:
        number = next(self._ids)
        request = _request(number, how, command)
        with ExitStack() as undo:
            undo.callback(self._forget, number)
            self._wanted.add(number)
            self._wire.write(request, _left(deadline, "the guest takes no command"))
            yield number
            undo.pop_all()

    def _forget(self, number: int) -> None:
        self._wanted.discard(number)
        self._pids.pop(number, None)
        self._finished.pop(number, None)
        # A guest that listens no more has nothing to stop.
        with suppress(TargetError):
            self.stop(number)

    def _end_of(self, number: int, command: Command, deadline: float | None) -> Finished:
        what = f"{_shown(command)} did not end in the guest"
        # It stays wanted when the time is over: a started command may be waited for again.
        finished = self._take(self._finished, number, deadline=deadline, what=what)
        self._wanted.discard(number)
        return finished

    def _take(
        self, answers: dict[int, _T], number: int, *, deadline: float | None, what: str
    ) -> _T:
        while True:
            with self._lock:
                if number in answers:
                    return answers.pop(number)
                self._read(_left(deadline, what))

    def _read(self, left_s: float | None) -> None:
        self._buffer += self._wire.read(_TURN_S if left_s is None else min(left_s, _TURN_S))
        while self._take_answer():
            pass

    def _take_answer(self) -> bool:
        end = self._buffer.find(b"\n", 0, _LONGEST_LINE)
        if end < 0:
            if len(self._buffer) >= _LONGEST_LINE:
                raise self._nonsense(bytes(self._buffer[:_LONGEST_LINE]))
            return False
        line = bytes(self._buffer[:end])
        word, *numbers = line.split(b" ")
        if _NUMBERS.get(word) != len(numbers) or not all(n.isdigit() for n in numbers):
            raise self._nonsense(line)
        values = [int(number) for number in numbers]
        sent = values[5] if word == b"done" else 0
        if max([0, *values[4:]]) > self._longest_output:
            raise self._nonsense(line)
        if len(self._buffer) < end + 1 + sent:
            return False
        data = bytes(self._buffer[end + 1 : end + 1 + sent])
        del self._buffer[: end + 1 + sent]
        self._note(values, data)
        return True

    def _note(self, values: list[int], data: bytes) -> None:
        match values:
            case []:
                self._is_ready = True
            case [number, pid] if number in self._wanted:
                self._pids[number] = pid
            case [number, pid, status, packed, size, _] if number in self._wanted:
                output = self._unpacked(data, size) if packed else data
                self._finished[number] = Finished(status=status, output=output, pid=pid)
            case _:
                pass

    def _unpacked(self, data: bytes, size: int) -> bytes:
        unpacker = zlib.decompressobj(wbits=_GZIP)
        try:
            output = unpacker.decompress(data, max_length=size)
        except zlib.error as e:
            raise self._nonsense(data) from e
        if len(output) != size:
            raise self._nonsense(data)
        return output

    def _nonsense(self, line: bytes) -> TargetError:
        return TargetError(f"the guest's agent speaks nonsense: {line[:60]!r}")


class Running:
    """A command that was started in the guest.

    Attributes:
        pid: in the guest.
    """

    def __init__(self, agent: Agent, number: int, *, command: Command, pid: int) -> None:
        self._agent = agent
        self._number = number
        self._command = command
        self.pid = pid
        self._finished: Finished | None = None

    def __repr__(self) -> str:
        """Return what it is: the command, and its number."""
        return f"<Running {_shown(self._command)}, pid {self.pid}>"

    def wait(self, timeout_s: float | None = None) -> Finished:
        """Return its end; the same one each time.

        Raises:
            TargetError: not ended in time; it runs on.
            GuestGoneError: the guest died.
        """
        if self._finished is None:
            self._finished = self._agent.wait(self._number, self._command, timeout_s)
        return self._finished

    def go(self) -> None:
        """Let it begin, if it was started held: from its exec on it is the user's command."""
        self._agent.go(self._number)

    def kill(self) -> None:
        """Kill it and the processes that it started; ``wait`` then tells how it ended."""
        if self._finished is None:
            self._agent.stop(self._number)


def _request(number: int, how: str, command: Command) -> bytes:
    text = command if isinstance(command, str) else shlex.join(command)
    request = f"start {number} {how} {_quoted(text)}\n".encode()
    if len(request) > _LONGEST_REQUEST:
        raise UsageError(
            f"a command of {len(text)} characters is too long for the guest's console: "
            "put it into a file of the guest"
        )
    return request


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(deadline: float | None, what: str) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TargetError(f"{what} in time")
    return left


def _shown(command: Command) -> str:
    text = command if isinstance(command, str) else shlex.join(command)
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:57]}...")


def _quoted(text: str) -> str:
    """Write a text as one word of one line, in ASCII, for the guest's shell."""
    data = text.encode(errors="surrogateescape")
    if b"\0" in data:
        raise UsageError("a command with a NUL character")
    plain = {byte: chr(byte) for byte in range(0x20, 0x7F) if chr(byte) not in "'\\"}
    return "$'" + "".join(plain.get(byte, f"\\{byte:03o}") for byte in data) + "'"


_SHELL = "/bin/sh"
_BY_SIGNAL = 128
# <linux/ptrace.h>
_TRACE_ME, _DETACH = 0, 17
# Found before there is a fork: after it no library is loaded.
_PTRACE = ctypes.CDLL(None, use_errno=True).ptrace
_PTRACE.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_PTRACE.restype = ctypes.c_long


class Child:
    """A command that was started, in a session of its own.

    Attributes:
        pid: of it.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", output: BinaryIO, command: Command
    ) -> None:
        self._process = process
        self._output = output
        self._command = command
        self._finished: Finished | None = None
        self.pid = process.pid

    def __repr__(self) -> str:
        """Return what it is: the command, and its number."""
        return f"<Child {_shown(self._command)}, pid {self.pid}>"

    def wait(self, timeout_s: float | None = None) -> Finished:
        """Return its end; the same one each time.

        Raises:
            TargetError: not ended in time; it runs on.
        """
        if self._finished is None:
            self._finished = self._wait(timeout_s)
        return self._finished

    def go(self) -> None:
        """Let it begin, if it was started held; by the thread that did so."""
        _PTRACE(_DETACH, self.pid, None, None)

    def kill(self) -> None:
        """Kill it and the processes that it started; ``wait`` then tells how it ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _wait(self, timeout_s: float | None) -> Finished:
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as e:
            raise TargetError(f"{self._command!r} did not end in time") from e
        self._output.seek(0)
        with self._output:
            output = self._output.read()
        # As a shell counts it.
        return Finished(
            status=status if status >= 0 else _BY_SIGNAL - status, output=output, pid=self.pid
        )


def start(command: Command, *, is_held: bool = False) -> Child:
    """Start a command: words, or a line for the shell.

    One that is held stands where its exec is over and it has done nothing yet, until it is told to
    ``go``.

    Raises:
        UsageError: there is no such program, or nobody may hold one.
    """
    words = [_SHELL, "-c", command] if isinstance(command, str) else list(command)
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the command has ended
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_stop_at_exec if is_held else None,  # noqa: PLW1509 - one call of C
        )
    except subprocess.SubprocessError as e:
        output.close()
        raise UsageError("ptrace is forbidden here: --all-tasks does without it") from e
    except (OSError, ValueError) as e:
        output.close()
        raise UsageError(f"cannot run {words[0]}: {getattr(e, 'strerror', None) or e}") from e
    if is_held:
        # The trap after its exec: ptrace(2), PTRACE_TRACEME.
        os.waitpid(process.pid, os.WUNTRACED)
    return Child(process, output, command)


def _stop_at_exec() -> None:
    if _PTRACE(_TRACE_ME, 0, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
