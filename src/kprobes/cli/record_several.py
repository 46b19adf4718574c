"""``kprobe record`` of several targets in one command: a process for each, ended together.

What stands before the first ``-t`` is for all of them, what follows a ``-t`` for that target; but
``--output``, ``--ready`` and ``--summary`` are for all of them wherever they stand. Each process is
an ordinary ``kprobe record``, in a session of its own: a Ctrl-C of the terminal comes to us alone,
and we pass it on once. Its standard input is a pipe that we hold: it ends when we were killed, and
ends the recording.
"""

import argparse
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from msgspec import Struct

from kprobes.cli.files import report_ready
from kprobes.cli.terminal import SIGNALS, counted, print_message, status_of
from kprobes.errors import KprobesError, UsageError

_COMMAND = "record"
_TARGET = re.compile(r"-q*t.*|--target(?:=.*)?", re.DOTALL)
"""No value is one of these: argparse takes none that looks like an option."""
_OURS = re.compile(r"-(q*)o(.*)|--(?:output|ready|summary)(=.*)?", re.DOTALL)
"""What is of the whole, and of each process its own: the letter, behind others, or the words."""
_NO_COMMAND = (
    "COMMAND runs in one guest: record that one alone, or leave COMMAND away and use --duration"
)
_NO_FORM = "--summary %s of several targets needs a file, for each its own: --summary %s:FILE"
_NOT_SAFE = re.compile(r"[^A-Za-z0-9._]+")
_LONGEST_NAME = 100
_POLL_S = 0.05
_MOST = 1 << 20
"""More than a pipe holds."""
_LONGEST_LINE = 1 << 16
_START = """
import sys
sys.path[:] = {path!r}
from importlib import import_module
import_module({module!r}).follow_parent()
sys.exit(import_module("kprobes.__main__").main())
"""


def split(words: Sequence[str]) -> list[list[str]]:
    """Return a command line for each target; none unless several are to be recorded.

    Raises:
        UsageError: they are, and a command is to run in one of them.
    """
    at = words.index("--") if "--" in words else len(words)
    name = next((at for at, word in enumerate(words) if not word.startswith("-")), len(words))
    if words[name : name + 1] != [_COMMAND]:
        return []
    begins = [each for each in range(name, at) if _TARGET.fullmatch(words[each])]
    if len(begins) < 2:
        return []
    if at < len(words):
        raise UsageError(_NO_COMMAND)
    whole, common = _divided(words[name + 1 : begins[0]])
    lines: list[list[str]] = []
    for begin, end in zip(begins, [*begins[1:], at], strict=True):
        more, own = _divided(words[begin:end])
        whole += more
        lines.append([*common, *own])
    return [[*words[: name + 1], *whole, *line] for line in lines]


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    # What is of the whole, and the others.
    whole: list[str] = []
    others: list[str] = []
    left = iter(words)
    for word in left:
        found = _OURS.fullmatch(word)
        if found is None:
            others.append(word)
            continue
        flags, *values = found.groups()
        if flags:
            others.append(f"-{flags}")
        value = [] if any(values) else [*islice(left, 1)]
        # Without a value it stays where it is: it must not take the next one's.
        taking = whole if value or any(values) else others
        taking += [f"-{word[1 + len(flags or '') :]}", *value]
    return whole, others


class Part(Struct, frozen=True, kw_only=True):
    """One target, and the process that records it.

    Attributes:
        name: the target's, as files and lines have it.
        words: of the process, all but ``--ready``.
        args: what they mean.
    """

    name: str
    words: Sequence[str]
    args: argparse.Namespace


def parts_of(several: Sequence[tuple[Sequence[str], argparse.Namespace]]) -> list[Part]:
    """Return what each target's process does: x.rec becomes x.NAME.rec.

    Args:
        several: the command line of each target, and what it means.

    Raises:
        UsageError: options that make no sense for several.
    """
    every = [args for _, args in several]
    _check(every)
    names = _names([args.target for args in every])
    parts: list[Part] = []
    for (line, args), name in zip(several, names, strict=True):
        form, summary = args.summary
        args.recording = _own_file(args.recording, name)
        own = [f"--output={args.recording}"]
        if summary is not None:
            args.summary = form, _own_file(summary, name)
            own.append(f"--summary={form}:{args.summary[1]}")
        at = line.index(_COMMAND) + 1
        words = [*line[:at], *own, *_divided(line[at:])[1]]
        parts.append(Part(name=name, words=words, args=args))
    return parts


def _check(every: Sequence[argparse.Namespace]) -> None:
    if str(every[0].recording) == "-":
        raise UsageError("-o - is for one target: one stream cannot have several recordings")
    if every[0].recording == every[0].summary[1]:
        raise UsageError(f"{every[0].recording} would be written twice")
    form, path = every[0].summary
    if form != "text" and path is None:
        raise UsageError(_NO_FORM % (form, form))
    if any("-" in args.definitions for args in every):
        raise UsageError("standard input is for one target: put its definitions into a @FILE")
    controls = Counter(args.control for args in every if args.control is not None)
    if any(count > 1 or control.startswith("fd:") for control, count in controls.items()):
        raise UsageError("--control: give each target named pipes of its own, after its -t")


def _names(targets: Sequence[str]) -> list[str]:
    # libvirt:web is libvirt-web, a socket's path its words.
    names = [_NOT_SAFE.sub("-", each).strip("-.")[-_LONGEST_NAME:] or "target" for each in targets]
    for name, count in Counter(names).items():
        if count > 1:
            same = [target for target, own in zip(targets, names, strict=True) if own == name]
            if len({*same}) == 1:
                raise UsageError(f"-t {same[0]}: given twice")
            raise UsageError(f"{' and '.join(same)} would have files of one name, {name}")
    return names


def _own_file(path: Path, name: str) -> Path:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file: each of several targets has one beside it")
    return path.with_name(f"{path.stem}.{name}{path.suffix}")


def record_several(parts: Sequence[Part], *, command: Sequence[str] | None = None) -> int:
    """Record targets until the last one has ended; return the exit code.

    That is the highest of all processes, or that of the first which ended before it was armed: the
    others are ended then.

    Args:
        parts: the targets.
        command: what is run with the words of each; None for this ``kprobe``.

    Raises:
        KprobesError: a process cannot be started, or nobody takes ``--ready``.
    """
    is_quiet = all(part.args.quiet for part in parts)
    is_armed = False
    with _Group() as group:
        group.start(parts, _kprobe() if command is None else command)
        while group.is_running:
            group.wait()
            if group.is_armed and not is_armed:
                is_armed = True
                _announce(parts, is_quiet=is_quiet)
            group.end_unless_armed()
        files = group.files()
    if files and not is_quiet:
        print_message(f"to print what was recorded: kprobe report {shlex.join(files)}")
    return group.code


def _announce(parts: Sequence[Part], *, is_quiet: bool) -> None:
    if not is_quiet:
        print_message(f"recording on {counted(len(parts), 'target')}; Ctrl-C ends")
    ready = parts[0].args.ready
    if ready is not None:
        report_ready(ready)


def _kprobe() -> list[str]:
    # As we found our own modules, whatever PYTHONPATH or --user say; but not where somebody stands.
    own = str(Path(__file__).parents[2])
    path = [own, *(each for each in sys.path if Path(each).is_absolute() and each != own)]
    return [sys.executable, "-I", "-c", _START.format(path=path, module=__name__)]


def follow_parent() -> None:
    """Take signals from now on, and end as by Ctrl-C when the parent is killed.

    For the process of a target, before its command: it was started with signals blocked, so that
    none comes to a Python that is not up yet.
    """
    pipe = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def follow() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGINT)

    # Before signals come: they are the main thread's.
    threading.Thread(target=follow, name="kprobes-parent", daemon=True).start()
    # Until the command has its own handlers, a traceback would be shown.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class _Recorder:
    # The process of one target.

    def __init__(self, part: Part, command: Sequence[str], pipe: int) -> None:
        self.part = part
        self.is_ready = False
        self.code: int | None = None
        self._line = b""
        self._ready, ready = os.pipe()
        try:
            self.process = _started([*command, *part.words, f"--ready={ready}"], pipe, ready)
        except OSError as error:
            os.close(self._ready)
            raise KprobesError(f"cannot start {command[0]}: {error.strerror}") from error
        finally:
            os.close(ready)
        assert self.process.stderr is not None
        self._stderr = self.process.stderr.fileno()
        self.open_files = {self._ready, self._stderr}
        for file in self.open_files:
            os.set_blocking(file, False)

    def update(self) -> None:
        """Pass on what it has printed since, and note what has become of it."""
        # First: when it has ended, all that it printed is there.
        status = self.process.poll()
        self._print(self._read(self._stderr))
        self.is_ready = bool(self._read(self._ready)) or self.is_ready
        if status is not None:
            self._print(b"\n" if self._line else b"")
            self.close()
            self.code = status if status >= 0 else status_of(-status)

    def close(self) -> None:
        """Let its pipes go."""
        self.open_files.clear()
        os.close(self._ready)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self, file: int) -> bytes:
        data = b""
        if file in self.open_files:
            try:
                data = os.read(file, _MOST)
            except BlockingIOError:
                return b""
            if not data:
                self.open_files.discard(file)
        return data

    def _print(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _LONGEST_LINE:
            lines.append(self._line)
            self._line = b""
        if lines:
            texts = (line.decode(errors="backslashreplace") for line in lines)
            print_message("\n".join(f"{self.part.name}: {text}".rstrip() for text in texts))


def _started(command: Sequence[str], pipe: int, ready: int) -> "subprocess.Popen[bytes]":
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(
            command,
            stdin=pipe,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(ready,),
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Group:
    # All of them, and the signals that come to us while it is entered.

    def __init__(self) -> None:
        self._recorders: list[_Recorder] = []
        self._unarmed: _Recorder | None = None
        self._is_asked = False
        # Signals that came while processes were started, until all are.
        self._kept: list[int] | None = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        for number in (*SIGNALS, signal.SIGUSR2):
            before = signal.getsignal(number)
            # nohup means it.
            if number != signal.SIGHUP or before is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
                self._undo.callback(signal.signal, number, before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # There are some only after an error.
        if not self._is_asked and self._unarmed is None:
            self._send(signal.SIGINT)
        while self.is_running:
            self.wait()
        self._undo.close()

    @property
    def is_running(self) -> bool:
        """Whether one has not ended."""
        return any(each.code is None for each in self._recorders)

    @property
    def is_armed(self) -> bool:
        """Whether all are, or were."""
        return all(each.is_ready for each in self._recorders)

    @property
    def code(self) -> int:
        """What we end with."""
        if self._unarmed is not None:
            return self._unarmed.code or 1
        return max(each.code or 0 for each in self._recorders)

    def files(self) -> list[str]:
        """Return what can be printed together."""
        is_whole = all(each.part.args.rotate is None for each in self._recorders)
        if self._unarmed is not None or not is_whole:
            return []
        paths = [each.part.args.recording for each in self._recorders if each.is_ready]
        return [str(path) for path in paths if path.exists()]

    def start(self, parts: Sequence[Part], command: Sequence[str]) -> None:
        """Start a process for each."""
        pipe, ours = os.pipe()
        self._undo.callback(os.close, ours)
        try:
            for part in parts:
                self._recorders.append(_Recorder(part, command, pipe))
        finally:
            os.close(pipe)
            kept, self._kept = self._kept, None
            for number in kept or ():
                self._send(number)

    def wait(self) -> None:
        """Wait a moment, and see what has become of each."""
        running = [each for each in self._recorders if each.code is None]
        poll = select.poll()
        for each in running:
            for file in each.open_files:
                poll.register(file, select.POLLIN)
        poll.poll(_POLL_S * 1000)
        for each in running:
            each.update()

    def end_unless_armed(self) -> None:
        """End the others when one has ended before it was armed."""
        if self._is_asked or self._unarmed is not None:
            return
        ended = (each for each in self._recorders if each.code is not None)
        self._unarmed = next((each for each in ended if not each.is_ready), None)
        if self._unarmed is not None and self.is_running:
            print_message(f"kprobe: {self._unarmed.part.name} is not armed: the others are ended")
            self._send(signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGUSR2:
            self._send_snapshot()
            return
        was_asked, self._is_asked = self._is_asked, True
        if self._kept is not None:
            self._kept.append(number)
        elif was_asked or self._unarmed is None:
            # Those that we have ended ourselves are to finish: a second one would not let them.
            self._send(number)

    def _send(self, number: int) -> None:
        for each in self._recorders:
            if each.code is None:
                each.process.send_signal(number)

    def _send_snapshot(self) -> None:
        # Without a snapshot it would end them, and before they are ready there is none.
        for each in self._recorders:
            if each.code is None and each.is_ready and each.part.args.snapshot is not None:
                each.process.send_signal(signal.SIGUSR2)
