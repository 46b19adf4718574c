"""Lines and variables of a module that a guest has loaded, by Debian's debug information of it.

What a probe at a line reads by name is what one at the function's entry, or the guest itself, says
of the same packets.
"""

import re
from collections.abc import Generator
from pathlib import Path

import pytest

import kprobes
from kprobes.errors import RefusedError
from kprobes.formats.elf import noted_build_id
from kprobes.guest.attach import Access
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.command import Command
from tests.build.debug_info import debug_module
from tests.build.module import dummy
from tests.system.conftest import Boot

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

LOAD = """insmod /dummy.ko numdummies=3 && ip addr add 10.9.9.9/24 dev dummy1 && {
echo 1 > /proc/sys/net/ipv6/conf/dummy1/disable_ipv6; ip link set dummy1 up; }"""
WORK = "ping -c 1 -W 1 -s 100 10.9.9.7; ping -c 1 -W 1 -s 300 10.9.9.8"


@pytest.fixture
def kernel(arch: str) -> Generator[GuestSession]:
    options = MachineOptions(arch=arch, files={"/dummy.ko": dummy("bookworm", arch)})
    access = Access(modules=[debug_module(arch)])
    with kprobes.boot(options, access=access) as session:
        yield session


@pytest.mark.arches("amd64")
def test_variables_of_the_kernel_are_read_where_a_module_declares_them(
    kernel: GuestSession,
) -> None:
    assert kernel.run(LOAD, timeout_s=300).status == 0
    kernel.probe(
        "p dummy:dummy_xmit:4 count=nr_cpu_ids off=this_cpu_off "
        "wanted=this_cpu_read(@this_cpu_off) own=numdummies"
    )
    with kernel.record() as trace:
        kernel.run(WORK, timeout_s=300)

    events = [*trace]
    assert len(events) >= 2
    assert {(event["count"], event["own"]) for event in events} == {(2, 3)}
    assert all(event["off"] == event["wanted"] > 0 for event in events)


def test_lines_and_variables_of_a_module(kernel: GuestSession) -> None:
    with pytest.raises(RefusedError, match="dummy is not loaded: where its lines are is known"):
        kernel.probe("p dummy:dummy_xmit:4")
    assert kernel.run(LOAD, timeout_s=300).status == 0

    kernel.probe("p:entry dummy_xmit skb dev=dev len=skb->len")
    kernel.probe("p:later dummy:dummy_xmit:4 skb len=skb->len dummies=numdummies")
    # Which is inlined there, and gets the length.
    kernel.probe("p:copy dummy:dev_lstats_add dev len")
    with kernel.record() as trace:
        kernel.run(WORK, timeout_s=300)

    entries = [(event.pid, event["skb"], event["len"]) for event in trace["entry"]]
    assert len(entries) >= 2
    assert [(event.pid, event["skb"], event["len"]) for event in trace["later"]] == entries
    assert {event["dummies"] for event in trace["later"]} == {3}
    assert [(event["dev"], event["len"]) for event in trace["copy"]] == [
        (event["dev"], event["len"]) for event in trace["entry"]
    ]

    # It may be of another build when it comes again.
    assert kernel.run("rmmod dummy && insmod /dummy.ko", timeout_s=300).status == 0
    assert kernel.driver.waiting == ()


def test_they_are_listed_and_a_file_of_another_build_is_refused(
    boot: Boot, tmp_path: Path, arch: str
) -> None:
    machine = boot(files={"/dummy.ko": dummy("bookworm", arch)})
    assert machine.run(LOAD, 300).status == 0
    other = tmp_path / "dummy.ko"
    data = debug_module(arch).read_bytes()
    build_id = noted_build_id(lambda at, size: data[at : at + size])
    other.write_bytes(data.replace(build_id, bytes(len(build_id))))
    address = f"qemu:{machine.stub_address}"
    target = ("-t", address, "--module", str(debug_module(arch)))
    with Command(tmp_path / "state") as command:
        of_file = command("lines", *target, "dummy:drivers/net/dummy.c:59-66").stdout.decode()
        function = command("lines", *target, "dummy_xmit").stdout.decode()
        variables = command("vars", *target, "dummy:dummy_xmit:4", "--externs").stdout.decode()
        done = command("lines", "-t", address, "--module", str(other), "dummy_xmit")

    place = r"dummy_xmit\+0x\w+/0x\w+ \[dummy\]"
    assert function.startswith("dummy_xmit at drivers/net/dummy.c:59\n")
    assert re.search(rf"^ +4  {place}", function, re.MULTILINE)
    assert re.search(rf"^ +63  {place}", of_file, re.MULTILINE)
    assert re.search(r"^  skb +struct sk_buff \* +%\w+$", variables, re.MULTILINE)
    assert re.search(r"^  numdummies +int +@0xffff\w+$", variables, re.MULTILINE)
    assert done.returncode == 1
    assert b"is not of the module that is loaded: its build is 0000" in done.stderr
