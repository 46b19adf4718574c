"""``kprobe debuginfo``: how files are shown; on guests in ``tests/system/test_debug_files.py``."""

import io
from argparse import Namespace
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kprobes.cli import debuginfo, target
from kprobes.cli.debuginfo import as_json, as_text
from kprobes.inspect import debug_files
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


def test_nobody_is_attached_to_while_a_package_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = list[str]()

    @contextmanager
    def source_of(_: Namespace) -> Generator[SimpleNamespace]:
        steps.append("attach")
        yield SimpleNamespace(kernel="the kernel")
        steps.append("leave")

    def files(_: object) -> list[DebugFile]:
        return _FILES[:1] if "fetch" in steps else _FILES

    def fetch(kernel: object, _: object, **_others: str) -> None:
        assert kernel == "the kernel"
        steps.append("fetch")

    monkeypatch.setattr(target, "source_of", source_of)
    monkeypatch.setattr(debug_files, "debug_files", files)
    monkeypatch.setattr(debug_files, "fetch_debug_files", fetch)
    args, out = Namespace(fetch=True, suite="", mirror="", quiet=True, format="text"), io.BytesIO()

    assert debuginfo.run(args, out) == 0

    assert steps == ["attach", "leave", "fetch", "attach", "leave"]
    assert out.getvalue() == b"the kernel  /debug/vmlinux\n"
