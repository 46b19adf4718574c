"""``python -m bench.source_once VMLINUX WHAT NAME``: ask debug information once.

Prints the most memory that it took, in MiB. WHAT is ``variables`` of a function at its entry,
``line`` of a file, or ``inlined``: the copies of a function.
"""

import resource
import sys
from pathlib import Path

from kprobes.dwarf.source import open_source


def main() -> None:
    """Ask, and find something."""
    path, what, name = sys.argv[1:]
    source = open_source([Path(path)], "x86_64", "", b"")
    if what == "variables":
        function = source.function(int(name, 16))
        found = source.variables(int(name, 16)) if function is not None else ()
    elif what == "line":
        file, _, line = name.partition(":")
        found = source.file_lines(file, int(line), int(line))
    else:
        found = source.inlined(name)
    if not found:
        raise SystemExit(f"nothing is known of {name}")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


if __name__ == "__main__":
    main()
