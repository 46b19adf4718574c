"""Commands on this machine: children of ours whose output is kept until they end."""

import ctypes
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import BinaryIO

from kprobes.errors import TargetError, UsageError
from kprobes.transport.agent import Command, Finished

_SHELL = "/bin/sh"
_BY_SIGNAL = 128
# <linux/ptrace.h>
_TRACE_ME, _DETACH = 0, 17
# Found before there is a fork: behind it no library is loaded.
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
        # The trap behind its exec: ptrace(2), PTRACE_TRACEME.
        os.waitpid(process.pid, os.WUNTRACED)
    return Child(process, output, command)


def _stop_at_exec() -> None:
    if _PTRACE(_TRACE_ME, 0, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
