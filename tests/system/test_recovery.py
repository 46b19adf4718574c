"""A killed tracer's patches that are not there any more: their module is gone, or they changed."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

import kprobes
from kprobes.errors import TargetError
from kprobes.guest.armed import FLAGS
from kprobes.guest.guardian import Guardian
from kprobes.guest.journal import read
from kprobes.plan.ftrace import DISABLED
from kprobes.ports import Ram
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import Phys
from tests.build.command import Command
from tests.build.module import LOAD, UNLOAD, dummy
from tests.build.victim import Home, Tracer, Witness, settle, witness_of

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]
_PROBES = "p:at dummy:dummy_setup\nr:back dummy:dummy_setup\np:read vfs_read"
_PAGE = 4096
# A word of it is as in a record that we left, and what is before that is no site's address.
_FILE = b"another." + DISABLED.to_bytes(8, "little") + random.Random(1).randbytes(_PAGE - 16)


def test_what_went_with_its_module_is_not_put_back(tmp_path: Path, arch: str) -> None:
    home = Home(tmp_path)
    files = {"/dummy.ko": dummy("bookworm", arch), "/file": _FILE}
    options = MachineOptions(arch=arch, files=files)
    with Machine.boot(options) as machine, Command(home.directory / "state") as kprobe:
        settle(machine)
        target = str(machine.stub_address)
        witness = witness_of(target, home)
        assert machine.run(LOAD, 180).status == 0
        with Tracer(home, target, _PROBES) as tracer:
            tracer.wait_for("armed")
            tracer.kill_with_guardian()
        assert machine.run(UNLOAD, 180).status == 0
        (journal,) = home.journals
        page = _page_of_file(witness.guest.memory.ram)
        assert _lead_to(page, journal, witness) == (1, True)

        done = kprobe("restore", "--target", target)

        assert done.returncode == 0, done.stdout.decode()
        assert witness.guest.memory.ram.read(page, _PAGE) == _FILE
        assert witness.is_pristine(), witness.changes()
        assert home.journals == []
        assert machine.run(f"{LOAD}; {UNLOAD}", 180).status == 0


def test_strange_text_of_the_kernel_keeps_the_journal(tmp_path: Path, arch: str) -> None:
    home = Home(tmp_path)
    options = MachineOptions(arch=arch)
    with Machine.boot(options) as machine, Command(home.directory / "state") as kprobe:
        settle(machine)
        target = str(machine.stub_address)
        witness = witness_of(target, home)
        ram = witness.guest.memory.ram
        # Nothing runs it: its bytes may be anything for a while.
        with Tracer(home, target, "p:never panic") as tracer:
            tracer.wait_for("armed")
            tracer.kill_with_guardian()
        (journal,) = home.journals
        (text,) = (patch for patch in read(journal).patches if patch.what != FLAGS)
        ram.write(text.phys, text.new[::-1])

        done = kprobe("restore", "--target", target)

        assert (done.returncode, home.journals) == (1, [journal])
        assert b"1 places hold bytes that are neither ours nor the kernel's" in done.stdout
        ram.write(text.phys, text.new)
        assert kprobe("restore", "--target", target).returncode == 0
        assert witness.is_pristine(), witness.changes()
        assert home.journals == []


def _page_of_file(ram: Ram) -> Phys:
    word = int.from_bytes(_FILE[16:24], "little")
    for start, size in ram.runs:
        data = ram.view(start, size)
        assert data is not None
        words = data.view(np.uint64)[2 :: _PAGE // 8]
        for index in np.flatnonzero(words == word).tolist():
            if ram.read(start + index * _PAGE, _PAGE) == _FILE:
                return Phys(start + index * _PAGE)
    raise AssertionError("the file is not in memory")


def _lead_to(page: Phys, journal: Path, witness: Witness) -> tuple[int, bool]:
    """Have a module's patches be where the guest keeps a file by now.

    Returns:
        How many records are among them, and whether there is text, too.
    """
    start, stop = witness.guest.kernel.text
    ram, where = witness.guest.memory.ram, dict[int, int]()
    for n, patch in enumerate(read(journal).patches):
        ip = int.from_bytes(ram.read(patch.phys - 8, 8), "little")
        if patch.what == FLAGS and not start <= ip < stop:
            where[patch.phys] = page + 8
        elif patch.what != FLAGS and not start <= patch.addr < stop:
            where[patch.phys] = page + 64 * (n + 1)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for undos in (line["undos"] for line in lines if "undos" in line):
        undos["phys"] = [where.get(phys, phys) for phys in undos["phys"]]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = list(where.values()).count(page + 8)
    return records, len(where) > records


def test_nothing_is_written_or_called_before_the_guardian_is_ready(
    guest: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [TargetError("it does not start")]

    def wait(guardian: Guardian) -> None:
        del guardian
        if late:
            raise late[0]

    monkeypatch.setattr(Guardian, "await_ready", wait)
    with kprobes.attach(str(guest.stub_address)) as session:
        driver = session.driver
        start, stop = driver.kernel.text
        before = driver.guest.memory.read(start, stop - start)
        session.probe("p:read vfs_read")
        with pytest.raises(TargetError, match="it does not start"), session.recording():
            pass
        with pytest.raises(TargetError, match="it does not start"):
            session.call("int_sqrt", 4)
        assert driver.pauses[1] == 1
        assert driver.guest.memory.read(start, stop - start) == before
        late.clear()
        with session.recording():
            assert driver.guest.memory.read(start, stop - start) != before
