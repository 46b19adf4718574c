"""drgn on guests without debug information: its helpers say what the guest's own files say.

What BTF leaves out is declared by us; where it has no names of data (arm64's 6.1), what needs these
is left out.
"""

import ast
import re
import sys
import threading
import time
from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from drgn import FaultError, Object, Program

import kprobes
from kprobes.errors import UsageError
from kprobes.handlers.live import LiveKernel
from kprobes.open import GuestSession
from kprobes.transport.agent import Job
from kprobes.transport.qemu_command import MachineOptions
from tests.system.conftest import SUITES

h: Any = import_module("drgn.helpers.linux")
"""It imports its helpers when it is imported, which type checkers do not see."""

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("7.x"),
]

_SLEEPER = "export MARK=here; exec 5</etc/passwd; exec sleep 10000"
_PAGE = Path(__file__).parent.parent.parent / "docs" / "howto" / "drgn.md"
_CLOSE = 0.1
"""How much numbers may differ that change all the time, as a share."""


@pytest.fixture(scope="module", params=["6.1", "7.x"])
def guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    options = MachineOptions(suite=SUITES[request.param], arch=arch)
    with kprobes.boot(options) as session:
        yield session


@pytest.fixture(scope="module")
def sleeper(guest: GuestSession) -> Generator[Job]:
    job = guest.start(_SLEEPER)
    await_comm(guest, job, b"sleep\n")
    yield job
    job.kill()


@pytest.fixture
def prog(guest: GuestSession) -> Program:
    return guest.drgn


@pytest.fixture
def task(prog: Program, sleeper: Job) -> Object:
    return h.find_task(prog, sleeper.pid)


def await_comm(guest: GuestSession, job: Job, comm: bytes) -> None:
    """Return when a command's task has its own name; it must get that."""
    deadline = time.monotonic() + 300
    while guest.run(f"cat /proc/{job.pid}/comm", timeout_s=300).output != comm:
        assert time.monotonic() < deadline


def text(guest: GuestSession, command: str) -> str:
    """Return what a command in the guest writes."""
    return guest.run(command, timeout_s=300).output.decode()


def field(text: str, name: str) -> int:
    """Return the number in the line of a name: ``MemTotal:  480 kB``."""
    found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def has_data(guest: GuestSession) -> bool:
    """Whether the kernel's symbols have names of data: arm64's 6.1 has those of exported ones."""
    return guest.kernel.symbols.find("slab_caches") is not None


def between(read: Callable[[], float], guest: GuestSession, command: str) -> tuple[float, ...]:
    """Return what is read before a command, what that says, and what is read after it."""
    before = read()
    middle = float(text(guest, command).split()[0])
    return before, middle, read()


def test_tasks_are_those_of_proc(guest: GuestSession, prog: Program) -> None:
    def pids() -> set[int]:
        return {task.pid.value_() for task in h.for_each_task(prog)}

    before, shown, after = pids(), text(guest, "cd /proc; echo */task/*"), pids()

    assert before & after
    assert before & after <= {int(each.rpartition("/")[2]) for each in shown.split()}
    assert {pid.numbers[0].nr.value_() for pid in h.for_each_pid(prog)} >= before & after
    assert h.find_task(prog, 1 << 21).value_() == 0


def test_a_task_is_what_proc_says(guest: GuestSession, prog: Program, task: Object) -> None:
    pid = task.pid.value_()
    stat = text(guest, f"cat /proc/{pid}/stat").split()
    # What VmRSS says is late by what the task has counted by itself.
    rollup = text(guest, f"cat /proc/{pid}/smaps_rollup")

    assert task.comm.string_() == b"sleep"
    assert h.pid_task(h.find_pid(prog, pid), prog.constant("PIDTYPE_PID")) == task
    assert h.cmdline(task) == [b"sleep", b"10000"]
    assert b"MARK=here" in (h.environ(task) or ())
    if has_data(guest):
        assert h.task_state_to_char(task) == stat[2] == "S"
        assert h.get_task_state(task).startswith("S")
    assert h.task_cpu(task) == int(stat[38])
    assert h.thread_group_leader(task)
    assert not h.task_is_kthread(task)
    assert 4 * h.task_rss(task).total == field(rollup, "Rss")
    assert h.task_vsize(task) == int(stat[22])
    assert not h.task_on_cpu(task)
    limit = re.search(r"Max open files +(\d+)", text(guest, f"cat /proc/{pid}/limits"))
    assert limit is not None
    assert int(limit[1]) == h.task_rlimits(task)["NOFILE"].cur


def test_a_task_s_files_and_memory_are_what_proc_says(
    guest: GuestSession, prog: Program, task: Object
) -> None:
    pid = task.pid.value_()
    listed = text(guest, f"cd /proc/{pid}/fd; for fd in *; do echo $fd $(readlink $fd); done")
    maps = text(guest, f"cat /proc/{pid}/maps")

    files = {fd: h.d_path(file.f_path).decode() for fd, file in h.for_each_file(task)}

    shown = dict(each.split(maxsplit=1) for each in listed.splitlines())
    assert files[5] == shown["5"] == "/etc/passwd"
    assert set(files) == {int(fd) for fd in shown}
    assert h.dentry_path(h.fget(task, 5).f_path.dentry) == b"etc/passwd"
    assert h.inode_path(h.fget(task, 5).f_inode) == b"etc/passwd"
    assert h.d_path(task.mm.exe_file.f_path).decode() == text(
        guest, f"readlink /proc/{pid}/exe"
    ).rstrip("\n")
    areas = [(vma.vm_start.value_(), vma.vm_end.value_()) for vma in h.for_each_vma(task.mm)]
    lines = [each.split() for each in maps.splitlines() if "[vsyscall]" not in each]
    assert areas == [tuple(int(end, 16) for end in each[0].split("-")) for each in lines]
    assert h.vma_find(task.mm, areas[0][0]).vm_end == areas[0][1]
    start = task.mm.arg_start
    assert h.access_process_vm(task, start, 12) == b"sleep\x0010000\0"
    assert h.access_remote_vm(task.mm, start, 12) == b"sleep\x0010000\0"
    page = h.follow_page(task.mm, start)
    assert prog.read(h.page_to_phys(page) + start.value_() % 4096, 5, True) == b"sleep"
    assert h.follow_phys(task.mm, start) == h.page_to_phys(page) + start.value_() % 4096
    assert h.follow_pfn(task.mm, start) == h.page_to_pfn(page)


def test_families_are_what_ps_says(guest: GuestSession, prog: Program, task: Object) -> None:
    first = prog["init_task"]
    children = list(
        h.list_for_each_entry("struct task_struct", first.children.address_of_(), "sibling")
    )

    assert {each.pid.value_() for each in children} == {1, 2}
    assert h.list_count_nodes(first.children.address_of_()) == 2
    assert not h.list_empty(first.children.address_of_())
    assert (
        h.list_first_entry(first.children.address_of_(), "struct task_struct", "sibling")
        in children
    )
    assert (
        h.list_last_entry(first.children.address_of_(), "struct task_struct", "sibling") in children
    )
    assert sum(1 for _ in h.validate_list_for_each(first.children.address_of_())) == 2
    assert h.task_is_kthread(h.find_task(prog, 2))
    assert task in h.for_each_task_in_group(task, include_self=True)
    assert h.kuid_val(task.cred.uid) == 0
    assert h.cgroup_path(task.cgroups.dfl_cgrp) == b"/"
    assert "SIGKILL" in h.signal_numbers(prog)[9]
    assert (
        h.sigset_to_hex(task.blocked)
        == text(guest, f"grep SigBlk /proc/{task.pid.value_()}/status").split()[1]
    )


def test_stacks_of_tasks_that_sleep_are_those_of_proc(guest: GuestSession, task: Object) -> None:
    lines = text(guest, f"cat /proc/{task.pid.value_()}/stack").splitlines()
    names = [re.sub(r".*\] (\S+)\+0x.*", r"\1", line) for line in lines]

    found = [frame.name for frame in guest.drgn.stack_trace(task)]

    # /proc leaves out what schedules.
    assert len(names) >= 4
    assert found[found.index(names[0]) :][: len(names)] == names


def test_mounts_are_those_of_proc(guest: GuestSession, prog: Program) -> None:
    lines = [each.split()[:3] for each in text(guest, "cat /proc/mounts").splitlines()]

    mounts = [
        [each(mount).decode() for each in (h.mount_src, h.mount_dst, h.mount_fstype)]
        for mount in h.for_each_mount(prog)
    ]

    assert len(lines) >= 4
    # Of the file system that the kernel itself begins with /proc has nothing.
    assert [each for each in mounts if each in lines] == lines
    entry = h.path_lookup(prog, "/etc/passwd")
    assert entry.dentry.d_inode.i_ino == int(text(guest, "stat -c %i /etc/passwd"))


def test_cpus_are_those_of_sysfs(guest: GuestSession, prog: Program) -> None:
    numbers: dict[str, Callable[[Program], int]] = {
        "online": h.num_online_cpus,
        "possible": h.num_possible_cpus,
        "present": h.num_present_cpus,
    }
    each: dict[str, object] = {
        "online": list(h.for_each_online_cpu(prog)),
        "possible": list(h.for_each_possible_cpu(prog)),
        "present": list(h.for_each_present_cpu(prog)),
    }
    for name, count in numbers.items():
        assert text(guest, f"cat /sys/devices/system/cpu/{name}") == "0-1\n"
        assert count(prog) == 2
        assert each[name] == [0, 1]
    assert h.cpumask_to_cpulist(h.cpu_online_mask(prog)) == "0-1"
    assert h.cpumask_weight(h.cpu_online_mask(prog)) == 2
    assert list(h.for_each_cpu(h.cpu_present_mask(prog))) == [0, 1]
    for cpu in (0, 1):
        assert h.idle_task(prog, cpu).comm.string_() == b"swapper/%d" % cpu
        assert h.cpu_rq(prog, cpu).cpu == cpu
        assert h.per_cpu(prog["runqueues"], cpu).cpu == cpu
        assert h.per_cpu_ptr(prog["runqueues"].address_of_(), cpu) == h.cpu_rq(prog, cpu)
        assert h.cpu_curr(prog, cpu).stack


def test_amounts_of_memory_are_those_of_proc(guest: GuestSession, prog: Program) -> None:
    info = text(guest, "cat /proc/meminfo")

    assert 4 * h.totalram_pages(prog) == field(info, "MemTotal")
    if has_data(guest):
        assert 4 * h.vm_commit_limit(prog) == field(info, "CommitLimit")
        assert 4 * h.nr_free_pages(prog) == pytest.approx(field(info, "MemFree"), rel=_CLOSE)
        mapped = h.global_node_page_state(prog, prog["NR_FILE_MAPPED"])
        assert 4 * mapped == pytest.approx(field(info, "Mapped"), rel=_CLOSE)
        assert list(h.for_each_online_node(prog)) == [0]


def test_pages_and_addresses_lead_to_each_other(
    guest: GuestSession, prog: Program, task: Object
) -> None:
    if not has_data(guest):
        return
    phys = h.virt_to_phys(task)
    page = h.virt_to_page(task)

    assert h.phys_to_virt(prog, phys).value_() == task.value_()
    assert h.page_to_pfn(page) == h.virt_to_pfn(task) == h.PHYS_PFN(phys)
    assert h.pfn_to_page(prog, h.page_to_pfn(page)) == page
    assert h.page_to_virt(page).value_() == task.value_() & ~0xFFF
    assert h.phys_to_page(phys) == page
    assert h.pfn_to_virt(prog, h.PHYS_PFN(phys)) == h.page_to_virt(page)
    assert h.PFN_PHYS(h.page_to_pfn(page)) == phys & ~0xFFF
    assert h.in_direct_map(task)
    comm = h.virt_to_phys(task.comm.address_of_())
    assert prog.read(comm, 6, True) == b"sleep\0"
    assert h.compound_order(h.compound_head(page)) >= 0
    slab = h.find_containing_slab_cache(task)
    assert slab.name.string_() == b"task_struct"


def test_times_are_those_of_the_guest(guest: GuestSession, prog: Program) -> None:
    if not has_data(guest):
        return
    for read, command in (
        (lambda: h.uptime(prog), "cat /proc/uptime"),
        (lambda: h.ktime_get_seconds(prog).value_(), "cat /proc/uptime"),
        (lambda: h.ktime_get_real_seconds(prog).value_(), "date +%s"),
    ):
        before, middle, after = between(read, guest, command)
        # The kernel keeps it as of the last tick.
        assert before - 2 <= middle <= after + 2
    assert len(h.loadavg(prog)) == 3


def test_the_log_is_the_guests(guest: GuestSession, prog: Program) -> None:
    guest.run("echo kprobes asks drgn > /dev/kmsg")

    assert b"kprobes asks drgn" in h.get_dmesg(prog)
    assert any(b"kprobes asks drgn" in each.text for each in h.get_printk_records(prog))


def test_devices_and_modules_are_those_of_proc_and_sysfs(
    guest: GuestSession, prog: Program
) -> None:
    assert [m.name.string_().decode() for m in h.for_each_module(prog)] == [
        line.split()[0] for line in text(guest, "cat /proc/modules").splitlines()
    ]
    ranges = re.findall(r" : (.*)", text(guest, "cat /proc/iomem"))
    resources = [
        each.name.string_().decode()
        for each in h.for_each_resource(prog["iomem_resource"].address_of_())
    ]
    assert [each for each in resources if each in ranges] == ranges
    if not has_data(guest):
        return
    assert text(guest, "cat /proc/sys/kernel/tainted") == "0\n"
    assert h.tainted(prog) == ""
    interrupts = re.findall(
        r"^ *(\d+):.* (\S+)$", text(guest, "cat /proc/interrupts"), re.MULTILINE
    )
    actions = {irq: h.irq_desc_action_names(desc) for irq, desc in h.for_each_irq_desc(prog)}
    assert interrupts
    for irq, name in interrupts:
        assert name.encode() in actions[int(irq)]
        assert h.irq_to_desc(prog, int(irq)).irq_data.irq == int(irq)
    assert [h.netdev_name(each) for each in h.for_each_netdev(prog)] == [
        each.encode() for each in text(guest, "ls /sys/class/net").split()
    ]
    loopback = h.netdev_get_by_name(prog, "lo")
    assert h.netdev_get_by_index(prog, loopback.ifindex) == loopback
    assert sum(1 for _ in h.for_each_net(prog)) == 1
    characters = {h.MAJOR(device) for device, *_ in h.for_each_registered_chrdev(prog)}
    blocks = {major for major, *_ in h.for_each_registered_blkdev(prog)}
    devices = text(guest, "cat /proc/devices").partition("Block devices:")
    assert characters >= {int(each) for each in re.findall(r"^ *(\d+) ", devices[0], re.MULTILINE)}
    assert blocks >= {int(each) for each in re.findall(r"^ *(\d+) ", devices[2], re.MULTILINE)}


def test_sysfs_and_slabs_are_those_of_the_guest(guest: GuestSession, prog: Program) -> None:
    if not has_data(guest):
        return
    listed = text(guest, "ls -a /sys/kernel").split()[2:]
    assert sorted(each.decode() for each in h.sysfs_listdir(prog, "kernel")) == sorted(listed)
    assert h.kernfs_path(h.sysfs_lookup_node(prog, "kernel/slab")) == b"/kernel/slab"
    assert h.kobject_path(h.sysfs_lookup_kobject(prog, "kernel/slab")) == b"/sys/kernel/slab"
    slabs = text(guest, "ls /sys/kernel/slab").split()
    names = {each.name.string_().decode() for each in h.for_each_slab_cache(prog)}
    # Those that are merged into others have their names there besides.
    assert "task_struct" in names <= set(slabs)
    found = h.find_slab_cache(prog, "task_struct")
    assert found is not None
    assert h.slab_cache_objects_per_slab(found) == int(
        text(guest, "cat /sys/kernel/slab/task_struct/objs_per_slab")
    )
    assert h.slab_cache_order(found) == int(text(guest, "cat /sys/kernel/slab/task_struct/order"))
    tasks = {each.value_() for each in h.for_each_task(prog)}
    allocated = h.slab_cache_for_each_allocated_object(found, "struct task_struct")
    assert len(tasks & {each.value_() for each in allocated}) >= len(tasks) - 8


def test_what_is_not_there_is_drgns_error(prog: Program) -> None:
    with pytest.raises(FaultError):
        prog.read(0xFFFFFFFFFFFFF000, 8)
    for name in ("nosuch_variable", "struct nosuch"):
        with pytest.raises(LookupError):
            prog.type(name) if " " in name else prog[name]
    with pytest.raises(LookupError):
        prog.symbol("nosuch_function")
    address = prog["vfs_read"].address_
    assert address is not None
    assert prog.symbol(address + 4).name == "vfs_read"


def test_without_drgn_it_is_said_how_to_get_it(
    guest: GuestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "drgn", None)
    monkeypatch.delitem(sys.modules, "kprobes.drgn.program", raising=False)
    for name in [each for each in sys.modules if each.startswith("kprobes.drgn.")]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(UsageError, match=r"pip install 'kprobes\[drgn\]'"):
        LiveKernel(lambda: guest.driver.guest).program()


def test_it_looks_while_probes_record(guest: GuestSession, prog: Program) -> None:
    guest.probe("p:seen vfs_write")
    over = threading.Event()
    job = guest.start("while :; do echo x > /dev/null; done")
    await_comm(guest, job, b"sh\n")
    try:
        with guest.record() as trace:
            timer = threading.Timer(3, over.set)
            timer.start()
            looks = 0
            while not over.is_set():
                assert h.find_task(prog, job.pid).comm.string_() == b"sh"
                assert len(list(h.for_each_task(prog))) > 20
                looks += 1
    finally:
        job.kill()
        guest.select().delete()
    assert looks >= 3
    assert len(trace) > 100


def test_every_example_of_the_page_runs(
    guest: GuestSession, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"kernel": guest}
    job = guest.start("while :; do echo hello > /tmp/written; done")
    try:
        shown = list[str]()
        for example in examples:
            exec(example, names)
            shown.append(capsys.readouterr().out)
        names["writing"].unregister()
        after = capsys.readouterr().out
    finally:
        job.kill()

    first, _, third = shown
    assert "0 /dev/console\n" in first
    assert "vfs_write" in third
    assert "/tmp/written" in third
    # What the second has registered prints from then on.
    assert "/tmp/written 6\n" in third + after


def test_at_least_fifty_functions_are_called_here() -> None:
    tree = ast.parse(Path(__file__).read_text())
    named = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "h"
    }

    assert len(named & set(h.__all__)) >= 50
