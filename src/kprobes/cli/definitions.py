"""Definitions as a command line gives them: words, ``@FILE``, or ``-`` for standard input.

A word may be the kernel's own boot parameter, ``kprobe_event=p,vfs_read,$arg1;r,vfs_read,$retval``.

``--python FILE``: a file of handlers, read before there is a guest and run when there is one.
"""

import io
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, cast

from msgspec import Struct

from kprobes.errors import DefinitionError, KprobesError, RefusedError, UsageError

if TYPE_CHECKING:
    # A third of a second to import, which reading a file does not need.
    from kprobes.model.definition import Definition
    from kprobes.open import AnySession

_MAX_SIZE = 16 << 20
_PARAMETER = "kprobe_event="


class Text(Struct, frozen=True, kw_only=True):
    """What one word of the command line stands for, and the file that it is from, or ""."""

    text: str
    source: str


def read_definitions(words: Sequence[str], *, arch: str | None = None) -> str:
    """Return what words stand for as one text, checked as far as that needs no kernel.

    Args:
        words: of the command line.
        arch: Debian's name of the guest's kind, or None where only the guest itself can tell.

    Raises:
        UsageError: a file cannot be read, or there is no definition at all.
        DefinitionError: the first one that is wrong; a note says where it stands.
    """
    texts = read_texts(words)
    if not _parsed(texts, _registers(arch)):
        raise UsageError("nothing to probe: no definition was given")
    return "\n".join(text.text for text in texts)


def parsed(words: Sequence[str]) -> "Sequence[Definition]":
    """Return the definitions that words stand for, whatever the kernel; errors as above."""
    return _parsed(read_texts(words), _registers(None))


def _parsed(texts: Sequence[Text], registers: Sequence[str]) -> "Sequence[Definition]":
    from kprobes.lang.append import apply
    from kprobes.lang.parser import parse_statements

    found: tuple[Definition, ...] = ()
    for text in texts:
        try:
            found = apply(parse_statements(text.text, registers=registers), existing=found)
        except DefinitionError as error:
            if text.source:
                error.add_note(text.source)
            else:
                error.__notes__ = []
            raise
    return found


def add_place(error: DefinitionError, words: Sequence[str]) -> None:
    """Note where in a file the definition stands that only the kernel showed to be wrong."""
    from kprobes.lang.lexer import lines_of

    for text in read_texts([word for word in words if word.startswith("@")]):
        for line in lines_of(text.text):
            if line.command == error.command:
                error.__notes__ = [f"line {line.number}", text.source]
                return


def _registers(arch: str | None) -> tuple[str, ...]:
    from kprobes.arch.registry import ARCHES
    from kprobes.transport.qemu_command import MACHINE_TYPES

    if arch is not None:
        return ARCHES[MACHINE_TYPES[arch].native].registers
    return tuple(name for each in ARCHES.values() for name in each.registers)


def read_texts(words: Sequence[str]) -> list[Text]:
    """Return what each word stands for.

    Raises:
        UsageError: a file cannot be read.
    """
    return [Text(text=_read(word), source=_source(word)) for word in words]


def _source(word: str) -> str:
    if word == "-":
        return "standard input"
    return word[1:] if word.startswith("@") else ""


def _read(word: str) -> str:
    if word.startswith(_PARAMETER):
        # As setup_boot_kprobe_events() in kernel/trace/trace_kprobe.c.
        return word.removeprefix(_PARAMETER).replace(",", " ").replace(";", "\n")
    if word != "-" and not word.startswith("@"):
        return word
    try:
        data = _bytes(word)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read definitions from {word.removeprefix('@')}: {why}") from error
    if len(data) > _MAX_SIZE:
        raise UsageError(f"{word}: more than {_MAX_SIZE >> 20} MiB of definitions")
    return text


def _bytes(word: str) -> bytes:
    if word == "-":
        return sys.stdin.buffer.read(_MAX_SIZE + 1)
    with Path(word[1:]).open("rb") as file:
        return file.read(_MAX_SIZE + 1)


class Script(Struct, frozen=True, kw_only=True):
    """A file that was compiled.

    Attributes:
        path: as it was given.
        code: of it.
    """

    path: Path
    code: CodeType

    def run(self, session: "AnySession") -> None:
        """Run it with ``kernel``, ``kprobes`` and the classes of probes in its names.

        Raises:
            UsageError: it raised something; with file and line.
            TargetError: the guest is gone.
        """
        import kprobes
        from kprobes.handlers.probe import Kprobe, Kretprobe

        # What handlers print is to be seen when they print it, not in blocks.
        cast("io.TextIOWrapper", sys.stdout).reconfigure(line_buffering=True)
        names = {
            "__name__": "__main__",
            "__file__": str(self.path),
            "kernel": session,
            "Kprobe": Kprobe,
            "Kretprobe": Kretprobe,
            "kprobes": kprobes,
        }
        try:
            exec(self.code, names)
        except (DefinitionError, RefusedError, UsageError) as error:
            raise UsageError(f"{self._place(error)}: {error}") from error
        except KprobesError as error:
            # The guest's fault, not the file's.
            error.add_note(self._place(error))
            raise
        except Exception as error:
            raise UsageError(f"{self._place(error)}: {_words(error)}") from error

    def _place(self, error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == str(self.path)]
        return f"{self.path}:{own[-1]}" if own else str(self.path)


def read_script(path: Path) -> Script:
    """Read and compile a file.

    Raises:
        UsageError: it cannot be read, or is not Python.
    """
    try:
        return Script(path=path, code=compile(path.read_bytes(), str(path), "exec"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno or 0}: {error.msg}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not Python: {error}") from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
