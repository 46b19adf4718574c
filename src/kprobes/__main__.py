"""The process ``kprobe``: what must be so before anything else is imported."""

import os
import signal
import sys
from types import FrameType

_WORDS = {signal.SIGINT: b"interrupted"}


def main() -> int:
    """Run the command line and return the exit code."""
    _open_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup means it.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)
    from kprobes.cli.main import main as run

    return run()


def _open_streams() -> None:
    # A descriptor that is closed would become that of the next file, which would then be written
    # to by mistake. Nothing can be written to what is opened for reading.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR if number == 2 else os.O_RDONLY)


def _end(number: int, frame: FrameType | None) -> None:
    # Nothing was begun that somebody must end: what must be ended has handlers of its own. An
    # exception would be swallowed, or shown, by whatever is imported.
    del frame
    word = _WORDS.get(signal.Signals(number), f"ended by {signal.Signals(number).name}".encode())
    os.write(2, b"kprobe: " + word + b"\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
