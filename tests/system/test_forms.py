"""Forms that the guests' own kernels do not know: each beside an explicit dereference.

Every event has its fields in pairs, ``a1`` and ``b1``, that must be equal on every hit.
"""

import re
from collections.abc import Generator
from io import BytesIO
from typing import Any

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import DefinitionError, RefusedError
from kprobes.open import GuestSession
from kprobes.sinks.text import TextSink
from kprobes.trace import Trace
from kprobes.transport.qemu_command import MachineOptions
from tests.build.defined import delete_all
from tests.build.json_lines import parsed
from tests.build.words import WORDS
from tests.system.conftest import Boot
from tests.system.event_definitions import definitions, event_of
from tests.system.test_find import modules

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_CPU = {
    "amd64": "(rq)this_cpu_ptr(@runqueues)->cpu",
    "arm64": "$current->thread_info.cpu",
}
_COUNTS = "(mount,mnt)(path->mnt)->mnt_pcp"
_PER_CPU = {"amd64": ("@runqueues", r"\{}"), "arm64": (_COUNTS, _COUNTS)}
"""A per-CPU object, and where it stands in the kernel's image or first chunk: without
``KALLSYMS_ALL`` nothing names one, but a pointer leads there."""


@pytest.fixture(
    scope="module", params=["bullseye", "bookworm", "bookworm-backports", "sid"], name="session"
)
def _session(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(suite=request.param, arch=arch)) as session:
        yield session


def _record(session: GuestSession, lines: list[str]) -> Trace:
    delete_all(session)
    session.probe("\n".join(lines))
    with session.record() as trace:
        session.run("cat /etc/passwd | head -c 20; ls /proc/self/; usleep 300000; kill -WINCH $$")
    return trace


def _events(trace: Trace) -> list[dict[str, Any]]:
    return parsed(trace.to_json(numbers="number"))


def test_each_form_fetches_what_an_explicit_dereference_does(
    session: GuestSession, arch: str
) -> None:
    names = ("forms.txt", f"forms_{arch}.txt")
    lines = [line for name in names for line in definitions(name, session.kernel)]

    events = _events(_record(session, lines))

    hit = {event["event"] for event in events}
    assert [line for line in lines if event_of(line) not in hit] == []
    assert len(lines) >= 24
    for event in events:
        args = event["args"]
        pairs = [(args[name], args[f"b{name[1:]}"]) for name in args if name[0] == "a"]
        assert all(a == b for a, b in pairs), event


def test_the_running_task_and_the_cpu_are_those_of_the_record(
    session: GuestSession, arch: str
) -> None:
    line = f"p exit_files pid=$current->pid cpu={_CPU[arch]}"

    events = _events(_record(session, [line]))

    assert len(events) > 3
    assert all(e["args"] == {"pid": e["pid"], "cpu": e["cpu"]} for e in events)


def test_a_per_cpu_object_is_where_the_kernel_s_table_says(
    session: GuestSession, arch: str
) -> None:
    per_cpu, address = _PER_CPU[arch]
    line = f"p vfs_open at=this_cpu_ptr({per_cpu}) place={address} table=@__per_cpu_offset:x64[2]"
    symbol = session.kernel.symbols.find(per_cpu.removeprefix("@"))

    events = _events(_record(session, [line.format(symbol and symbol.addr)]))

    assert events
    for event in events:
        args = event["args"]
        assert args["at"] == args["table"][event["cpu"]] + args["place"] & (1 << 64) - 1


def test_enums_are_numbers_or_names(session: GuestSession) -> None:
    trace = _record(session, ["p complete_signal sig type"])

    assert re.search(r" type=1\b", trace.to_text())
    out = BytesIO()
    sink = TextSink(out, replace(session.source, has_enum_names=True))
    for events in trace.events:
        sink.write(events)
    assert b" type=PIDTYPE_TGID" in out.getvalue()


def test_offsets_and_addresses_are_probed_where_the_function_begins(
    session: GuestSession, arch: str
) -> None:
    symbol = session.kernel.symbols.named("exit_files")
    lines = [WORDS[arch].of(f"p:raw {symbol.addr:#x} a=%di"), "p:named exit_files a=tsk"]

    events = _events(_record(session, lines))

    by_event = {
        name: [e["args"] for e in events if e["event"] == name] for name in ("raw", "named")
    }
    assert by_event["raw"] == by_event["named"] != []


def test_other_places_are_refused(session: GuestSession) -> None:
    delete_all(session)
    with pytest.raises(DefinitionError, match="boundary"):
        session.probe("p vfs_read+1")
    with pytest.raises(RefusedError, match="never returns"):
        session.probe("r do_exit")
    with pytest.raises(DefinitionError):
        session.probe("p vfs_read+1 $arg1")


@pytest.mark.parametrize("suite", ["bookworm", "bookworm-backports", "sid"])
def test_a_module_s_own_types_name_its_parameters_and_members(
    boot: Boot, arch: str, suite: str
) -> None:
    machine = boot(suite=suite, files=modules(suite, arch))
    assert machine.run(_DUMMY, 180).status == 0
    line = "dummy_xmit $arg1 len=skb->len name=dev->name:string q=dev->num_tx_queues"
    has_names = suite != "bookworm"
    if has_names:
        assert machine.run(_NATIVE % line, 180).status == 0

    with kprobes.attach(str(machine.stub_address)) as session:
        assert session.kernel.types is not None
        offset = session.kernel.types.offset("sk_buff", "len")
        session.probe(f"p:n dummy:{line} same=+{offset}($arg1):u32")
        with session.record() as trace:
            machine.run("ping -c 3 -W 1 10.9.9.2", 180)

    args = [event["args"] for event in _events(trace)]
    assert len(args) >= 3
    assert all(arg["len"] == arg["same"] > 0 and arg["name"] == "d0" for arg in args)
    if has_names:
        ours = re.findall(r"(skb=.*) same=", trace.to_text())
        shown = machine.run("grep -o 'skb=.*' /sys/kernel/tracing/trace").output.decode()
        assert shown.splitlines()[: len(ours)] == ours


@pytest.mark.parametrize("suite", ["bookworm-backports", "sid"])
def test_the_kernel_itself_finds_no_names_after_a_module_s(
    boot: Boot, arch: str, suite: str
) -> None:
    machine = boot(suite=suite, files=modules(suite, arch))
    assert machine.run(_DUMMY, 180).status == 0

    assert machine.run(_NATIVE % "dummy_xmit skb", 180).status == 0
    assert machine.run(_NATIVE % "dummy:dummy_xmit skb", 180).status != 0
    assert b"No BTF entry" in machine.run("cat /sys/kernel/tracing/error_log").output


_NATIVE = (
    "cd /sys/kernel/tracing; echo 'p:n %s' >> kprobe_events && echo 1 > events/kprobes/n/enable"
)
# IPv6 would send packets of its own, seconds later: the kernel's probe may see one before ours is
# armed.
_DUMMY = """insmod /modules/dummy.ko && ip link add d0 type dummy && ip addr add 10.9.9.1/24 dev d0
echo 1 > /proc/sys/net/ipv6/conf/d0/disable_ipv6 && ip link set d0 up && sleep 1"""


def test_functions_of_loaded_modules_are_probed_and_named(boot: Boot, arch: str) -> None:
    machine = boot(files=modules("bookworm", arch))
    assert machine.run("insmod /modules/dummy.ko", 180).status == 0

    with kprobes.attach(str(machine.stub_address)) as session:
        session.probe(
            WORDS[arch].of("p:a dummy:dummy_setup dev=$arg1 fn=%ip:symbol\np:b dummy_setup")
        )
        with session.record() as trace:
            assert machine.run("ip link add d0 type dummy", 180).status == 0

    lines = [line for line in trace.to_text().splitlines() if line[0] != "#"]
    assert len(lines) == 2
    assert all(re.search(r"\(dummy_setup\+0x\w/0x\w+ \[dummy\]\)", line) for line in lines)
    # The newest definition is recorded first.
    assert re.search(r" fn=dummy_setup\+0x\w/0x\w+ \[dummy\]$", lines[1])
