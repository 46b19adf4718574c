"""``python -m kprobes``: the same as ``kprobe``."""

import sys

from kprobes.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
