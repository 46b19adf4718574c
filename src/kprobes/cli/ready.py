"""``--ready FD|FILE``: a line for scripts when everything is armed."""

import os
import stat
from pathlib import Path

from kprobes.errors import KprobesError, UsageError

_READY = b"ready\n"


def check_ready(where: str) -> None:
    """Find out early whether it can be told; a file of an earlier time is taken away.

    Raises:
        UsageError: it cannot.
    """
    try:
        if where.isdecimal():
            os.fstat(int(where))
        elif not os.access(Path(where).parent, os.W_OK):
            raise UsageError(f"--ready {where}: its directory cannot be written")
        elif Path(where).is_file():
            Path(where).unlink()
    except OSError as error:
        raise UsageError(f"--ready {where}: {error.strerror}") from error


def tell_ready(where: str) -> None:
    """Write the line, to a descriptor that is closed then or to a file that appears.

    Raises:
        KprobesError: nobody takes it.
    """
    try:
        if where.isdecimal():
            os.write(int(where), _READY)
            if int(where) > 2:
                os.close(int(where))
            return
        # It stays open: the reader of a FIFO may come late.
        file = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.write(file, _READY)
        if not stat.S_ISFIFO(os.fstat(file).st_mode):
            os.close(file)
    except OSError as error:
        raise KprobesError(f"--ready {where}: {error.strerror}") from error
