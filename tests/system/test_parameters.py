"""Parameters by name on kernels that never had them: as a 6.12 kernel itself names and types them.

5.10 and 6.1 know no BTF arguments. For functions whose prototype did not change, what we make of
``$arg*`` there must be what the 6.12 kernel makes of it: names, types, order and text. An amd64
kernel says it of arm64's functions, too: what has the same prototype has the same fields.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from kprobes.image.file import kernel_from_image, read_image
from kprobes.inspect.check import checker_of_image
from kprobes.resolve.explain import format_text
from kprobes.transport.debian import kernel_image
from kprobes.transport.qemu_command import MachineOptions
from tests.system.conftest import SUITES, boot_or_skip

pytestmark = pytest.mark.guest

_NAMES = (
    "vfs_read vfs_write vfs_open vfs_llseek filp_close do_filp_open do_sys_openat2 ksys_read "
    "ksys_write vfs_fsync_range iterate_dir dput path_put fput kill_pid wake_up_process "
    "schedule_timeout vm_mmap_pgoff handle_mm_fault security_file_permission mutex_lock "
    "down_read up_write complete queue_work_on mod_timer hrtimer_start_range_ns d_lookup "
    "tcp_v4_connect sock_sendmsg sock_recvmsg inet_bind do_mmap seq_read kernel_read "
    "send_signal_locked tcp_sendmsg udp_sendmsg pipe_read pipe_write"
)
FUNCTIONS = _NAMES.split()
SCRIPT = """
cd /sys/kernel/tracing
for f in {functions}; do
    echo "== $f"
    echo "p:e_$f $f \\$arg*" > kprobe_events 2> /dev/null && grep -v ^ID: events/kprobes/e_$f/format
    echo > kprobe_events
done
"""
LEAST = 30
"""How many of them must have the same prototype in an older kernel and in 6.12."""


@pytest.fixture(scope="module")
def native() -> dict[str, str]:
    """Return what a 6.12 kernel's ``format`` files say, by function."""
    script = SCRIPT.format(functions=" ".join(FUNCTIONS))
    with boot_or_skip(MachineOptions(suite=SUITES["6.12"])) as machine:
        said = machine.run(["sh", "-c", script], 180).output.decode()
    parts = (part.partition("\n") for part in said.split("== ")[1:])
    return {name: text.strip() for name, _, text in parts if "field:" in text}


@pytest.mark.parametrize(
    ("release", "arch"), [("5.10", "amd64"), ("6.1", "amd64"), ("6.1", "arm64")]
)
def test_names_and_types_are_those_of_a_kernel_that_has_them(
    native: dict[str, str], release: str, arch: str
) -> None:
    kernel = kernel_image(suite=SUITES[release], arch=arch)
    ours = _formats(kernel, native)
    then, now = _prototypes(kernel), _prototypes(kernel_image(suite=SUITES["6.12"]))
    same = [name for name in ours if then.get(name) == now.get(name)]

    assert len(same) >= LEAST
    assert {name: ours[name] for name in same} == {name: native[name] for name in same}


def _formats(kernel: Path, names: Iterable[str]) -> dict[str, str]:
    checker = checker_of_image(kernel)
    found: dict[str, str] = {}
    for name in names:
        (verdict,) = checker.check(f"p:e_{name} {name} $arg*")
        if verdict.is_accepted:
            text = format_text(verdict.placed[0].probe.layout, number=0)
            found[name] = "\n".join(line for line in text.split("\n") if line != "ID: 0").strip()
    return found


@cache
def _prototypes(kernel: Path) -> dict[str, list[tuple[str, str]]]:
    types = kernel_from_image(read_image(kernel)).types
    assert types is not None
    found = {name: types.function(name) for name in FUNCTIONS}
    return {
        name: [(parameter.name, parameter.type) for parameter in prototype.parameters]
        for name, prototype in found.items()
        if prototype is not None
    }
