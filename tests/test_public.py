"""Names in ``import kprobes`` and ``python -m kprobes``."""

import pydoc
import subprocess
import sys

import kprobes


def test_the_public_names_are_seen_by_completion_and_help() -> None:
    shown = [name for name in dir(kprobes) if not name.startswith("_")]
    text = pydoc.plain(pydoc.render_doc(kprobes))

    assert shown == sorted(kprobes.__all__)
    assert {"MachineOptions", "attach", "boot", "host"} <= {*shown}
    assert all(name in text for name in shown)


def test_python_m_kprobes_is_kprobe() -> None:
    command = [sys.executable, "-m", "kprobes", "--version"]

    assert subprocess.run(command, capture_output=True, check=True).stdout.startswith(b"kprobe ")
