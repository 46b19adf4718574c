"""``kprobe debuginfo``: how files are shown; on guests in ``tests/system/test_debug_files.py``."""

from kprobes.cli.debuginfo import as_json, as_text
from kprobes.inspect.debug_files import DebugFile
from tests.build.json_lines import objects

_FILES = [DebugFile(module="", file="/debug/vmlinux"), DebugFile(module="snd_pcm", file="")]


def test_a_file_is_shown_beside_what_it_is_of() -> None:
    assert as_text(_FILES).splitlines() == ["the kernel  /debug/vmlinux", "snd_pcm     -"]


def test_what_is_missing_is_null() -> None:
    assert objects("debuginfo", as_json(_FILES)) == [
        {"module": "", "file": "/debug/vmlinux"},
        {"module": "snd_pcm", "file": None},
    ]
