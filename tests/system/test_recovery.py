"""A killed tracer's patches of a module that was unloaded before anything was put right."""

import subprocess
import sys
from pathlib import Path

import pytest

from kprobes.guest.armed import FLAGS, ArmedPatch
from kprobes.guest.journal import read
from kprobes.ports import Ram
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.module import LOAD, UNLOAD, dummy
from tests.build.victim import Home, Tracer, settle, witness_of

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]
_PROBES = "p:at dummy:dummy_setup\nr:back dummy:dummy_setup\np:read vfs_read"
_FILL = """set -- $(grep MemAvailable /proc/meminfo)
mkdir /all && mount -t tmpfs -o size=100% none /all || exit 1
dd if=/dev/zero of=/all/fill bs=1M count=$(($2 / 1024 - 50)) 2>&1"""
_OTHER = b"another."
_BEFORE = len(_OTHER)


def test_what_went_with_its_module_is_not_put_back(tmp_path: Path, arch: str) -> None:
    home = Home(tmp_path)
    files = {"/dummy.ko": dummy("bookworm", arch)}
    with Machine.boot(MachineOptions(arch=arch, files=files, memory_mib=384)) as machine:
        settle(machine)
        target = str(machine.stub_address)
        assert machine.run(LOAD, 180).status == 0
        witness = witness_of(target, home)
        start, stop = witness.guest.kernel.text
        ram = witness.guest.memory.ram
        with Tracer(home, target, _PROBES) as tracer:
            tracer.wait_for("armed")
            tracer.kill_with_guardian()
        (journal,) = home.journals
        gone = [p for p in read(journal).patches if not start <= _site(p, ram) < stop]
        records = [p for p in gone if p.what == FLAGS]
        assert (len(records), len(gone) > 1) == (1, True)
        assert machine.run(f"{UNLOAD}; {_FILL}", 180).status == 0
        # Its memory is a file's by now, in which a word is as we left the record.
        for patch in gone:
            ram.write(patch.phys - _BEFORE, _OTHER)
            ram.write(patch.phys, patch.new if patch in records else patch.new[::-1])

        _restore(target, home)

        # Unless the guest has used it meanwhile.
        same = [p for p in gone if ram.read(p.phys - _BEFORE, _BEFORE) == _OTHER]
        assert {*records} <= {*same}
        assert [p for p in same if ram.read(p.phys, len(p.old)) == p.old] == []
        assert witness.has_its_text()
        assert home.journals == []
        assert machine.run(f"umount /all; {LOAD}; {UNLOAD}", 180).status == 0


def _site(patch: ArmedPatch, ram: Ram) -> int:
    return (
        int.from_bytes(ram.read(patch.phys - 8, 8), "little") if patch.what == FLAGS else patch.addr
    )


def _restore(target: str, home: Home) -> None:
    words = [sys.executable, "-m", "kprobes", "restore", "--target", target]
    done = subprocess.run(words, env=home.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
