"""``--python FILE``: a file of handlers, read before there is a guest and run when there is one."""

import io
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, cast

from kprobes.errors import DefinitionError, KprobesError, RefusedError, UsageError

if TYPE_CHECKING:
    # A third of a second to import, which reading a file does not need.
    from kprobes.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A file that was compiled.

    Attributes:
        path: as it was given.
        code: of it.
    """

    path: Path
    code: CodeType

    def run(self, session: "Session") -> None:
        """Run it with ``kernel``, ``kprobes`` and the classes of probes in its names.

        Raises:
            UsageError: it raised something; with file and line.
            TargetError: the guest is gone.
        """
        import kprobes
        from kprobes.handlers.kprobe import Kprobe
        from kprobes.handlers.kretprobe import Kretprobe

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
        raise UsageError(f"{path} is no Python: {error}") from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
