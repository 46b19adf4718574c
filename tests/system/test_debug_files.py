"""Which files have a guest's debug information: where it was put, and what is said without it."""

import re
from pathlib import Path

import pytest

from kprobes.cli import debuginfo
from tests.build.command import Command
from tests.build.debug_info import debug_module, debug_vmlinux, release_of
from tests.build.module import dummy
from tests.system.conftest import Boot

pytestmark = pytest.mark.guest

EXAMPLES = re.findall(r"^  kprobe (debuginfo.*)$", debuginfo.EPILOG, re.MULTILINE)


def test_the_examples_show_what_is_there_and_what_is_not(
    boot: Boot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = boot(files={"/dummy.ko": dummy("bookworm", "amd64")})
    assert machine.run("insmod /dummy.ko", 180).status == 0
    release, vmlinux, module = release_of(), debug_vmlinux(), debug_module()
    top = tmp_path / "cache/kprobes/debug" / release / "usr/lib/debug"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KPROBES_TARGET", f"qemu:{machine.stub_address}")
    monkeypatch.delenv("DEBUGINFOD_URLS", raising=False)
    shown, fetched, as_json = (re.sub(r"-t \S+ ?", "", each).split() for each in EXAMPLES)
    with Command(tmp_path / "state") as command:
        before = command(*shown)
        for file, folder in ((vmlinux, "boot"), (module, f"lib/modules/{release}/kernel")):
            (top / folder).mkdir(parents=True)
            (top / folder / file.name).symlink_to(file)
        # All is there: nothing is downloaded.
        after, lines = command(*fetched, path="/nowhere"), command(*as_json)

    assert before.returncode == 1
    assert before.stdout == b"the kernel  -\ndummy       -\n"
    assert b"the kernel's is missing: docs/howto/source.md, or --fetch" in before.stderr
    assert after.returncode == 0, after.stderr.decode()
    assert re.search(
        rb"^the kernel  /.*/vmlinux-6\.1.*\ndummy       /.*/dummy\.ko\n$", after.stdout
    )
    assert lines.stdout.count(b'"file": "/') == 2
