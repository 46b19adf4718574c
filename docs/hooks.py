"""Hook of the site: pages get what is generated from the source."""

import re
import subprocess
import sys

_HELP = re.compile(r"^\$ kprobe( [a-z]+)? --help\n", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put a command's help below each line that asks for it."""
    return _HELP.sub(lambda found: found[0] + _help(*filter(None, [found[1]])), markdown)


def _help(*words: str) -> str:
    command = [sys.executable, "-m", "kprobes", *map(str.strip, words), "--help"]
    environment = {"COLUMNS": "100"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return found.stdout
