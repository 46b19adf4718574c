"""The real ``kprobe xray`` on real kernels: what the articles show with gdb, and what we add."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

import kprobes
from kprobes.transport.debian import kernel_image
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.json_lines import objects
from tests.build.waiting import becomes_true
from tests.system.conftest import ONCE, SUITES, boot_or_skip

KPROBE = Path(sys.executable).with_name("kprobe")
_WAITS = b"the probes are gone; waiting for a task of the guest"


def xray(*words: str) -> dict[str, Any]:
    """Return what ``kprobe xray`` says."""
    done = subprocess.run(
        [KPROBE, "xray", "--format", "json", *words], capture_output=True, timeout=180, check=False
    )
    # On a busy machine it may take a while until a task of an idle guest comes by, which is told.
    said = [line for line in done.stderr.splitlines() if not line.startswith(_WAITS)]
    assert (done.returncode, said) == (0, [])
    (found,) = objects("xray", done.stdout)
    return found


def look(machine: Machine, *words: str) -> dict[str, Any]:
    """Return what it says of a guest."""
    return xray("--target", f"qemu:{machine.stub_address}", *words)


def held(seen: dict[str, Any], mark: dict[str, Any], side: str) -> str:
    """Return the bytes that a side has of a mark."""
    start, stop = (int(mark[edge], 16) for edge in ("start", "stop"))
    rows = [row for row in seen["text"] if row["side"] in (side, "both")]
    found = {int(row["address"], 16): row["bytes"] for row in rows}
    return "".join(code for at, code in sorted(found.items()) if start <= at < stop)


def shown_at(seen: dict[str, Any], mark: dict[str, Any]) -> str:
    """Return the instruction in memory that a mark begins at."""
    (text,) = (
        row["text"]
        for row in seen["text"]
        if row["address"] == mark["start"] and row["side"] in ("memory", "both")
    )
    return text


def mark_by(seen: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the one mark that somebody left."""
    (mark,) = [mark for mark in seen["marks"] if mark["author"] == source]
    return mark


def notes(seen: dict[str, Any], title: str) -> list[str]:
    """Return what is noted in the one detour whose title begins so."""
    (detour,) = [d for d in seen["detours"] if d["title"].startswith(title)]
    return [row["note"] for row in detour["text"] if "note" in row]


pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]
AMD64 = pytest.mark.arches("amd64")

EVENTS = "cd /sys/kernel/tracing; echo '{}' >kprobe_events; echo 1 >events/kprobes/enable"
TRACED = "cd /sys/kernel/tracing; echo schedule >set_ftrace_filter; echo function >current_tracer"
UNTRACED = "cd /sys/kernel/tracing; echo nop >current_tracer; echo >set_ftrace_filter"
OVER = "cd /sys/kernel/tracing; echo 0 >events/kprobes/enable; echo >kprobe_events"
_PAIR = {name: SUITES[name] for name in ("6.1", "6.12")}


class Facts(Struct, frozen=True, kw_only=True):
    """What differs between two architectures' text.

    Attributes:
        nop: an idle ftrace site, with what boot puts before it.
        compiled: what boot makes that of, in words.
        plain: one of vfs_read's first instructions, that has no address in it.
        first: what of it a breakpoint replaces.
        breakpoint: the kernel's.
        jump: what a jump of ours is shown as.
        in_file: what schedule's file is shown to begin with.
        register, kept: some of them.
        has_segment: whether one instruction reaches this CPU's reservation word.
        rewrites_returns: whether boot may.
        own: at a function's entry, who marks the guest's own kprobe, in which words, and what
            detours there are beside the code of ours.
        exits: class and kinds of the ways out of vfs_getattr.
    """

    nop: str
    compiled: str
    plain: str
    first: str
    breakpoint: str
    jump: str
    in_file: str
    register: str
    kept: str
    has_segment: bool
    rewrites_returns: bool
    own: tuple[str, str, str]
    exits: tuple[str, set[str]]


INFO = {
    "amd64": Facts(
        nop="0f1f440000",
        compiled="boot makes a nop of the call to __fentry__",
        plain="4157",
        first="41",
        breakpoint="cc",
        jump="jmp",
        in_file="call    0x",
        register="%dx",
        kept="%bx",
        has_segment=True,
        rewrites_returns=True,
        own=("ftrace", "kprobe there: event own", "trampoline"),
        exits=("tail", {"return", "tail jump"}),
    ),
    "arm64": Facts(
        nop="e9031eaa1f2003d5",
        compiled="boot makes mov x9, x30 and a nop of two nops",
        plain="3f2303d5",
        first="3f2303d5",
        breakpoint="800020d4",
        jump="b ",
        in_file="paciasp",
        register="%x2",
        kept="%x19",
        has_segment=False,
        rewrites_returns=False,
        own=("kprobe", "a breakpoint; event own", "slot"),
        exits=("retinsn", {"return"}),
    ),
}


@pytest.fixture
def info(arch: str) -> Facts:
    return INFO[arch]


@pytest.fixture(scope="module", params=_PAIR.values(), ids=list(_PAIR))
def machine(request: pytest.FixtureRequest, arch: str) -> Iterator[Machine]:
    with boot_or_skip(MachineOptions(suite=request.param, arch=arch)) as booted:
        yield booted


def symbol_in_guest(machine: Machine, name: str) -> int:
    lines = machine.run(f"grep ' {name}$' /proc/kallsyms").output.split()
    return int(lines[0], 16)


@AMD64
def test_schedule_holds_a_nop_then_the_kernels_call_and_a_nop_again(machine: Machine) -> None:
    before = look(machine, "schedule")
    machine.run(EVENTS.format("p schedule"))
    during = look(machine, "schedule")
    machine.run(OVER)
    after = look(machine, "schedule")

    idle = mark_by(before, "ftrace")
    assert held(before, idle, "memory") == INFO["amd64"].nop
    assert "idle" in idle["says"]
    call = mark_by(during, "ftrace")
    assert held(during, call, "memory").startswith("e8")
    assert held(during, call, "image") == held(before, idle, "image") != INFO["amd64"].nop
    assert "kprobe_ftrace_ops (kprobe_ftrace_handler)" in call["says"]
    assert "event p_schedule_0" in call["says"]
    assert "the handler" in notes(during, "trampoline of kprobe_ftrace_ops")
    assert held(after, mark_by(after, "ftrace"), "memory") == INFO["amd64"].nop
    assert after["detours"] == []


def test_a_traced_function_holds_a_call_and_afterwards_what_it_held(
    machine: Machine, info: Facts
) -> None:
    before = look(machine, "schedule")
    machine.run(TRACED)
    during = look(machine, "schedule")
    machine.run(UNTRACED)
    after = look(machine, "schedule")

    assert held(before, mark_by(before, "ftrace"), "memory") == info.nop
    call = mark_by(during, "ftrace")
    assert "the guest's own ftrace: it calls " in call["says"]
    assert held(during, call, "memory") != info.nop
    assert held(during, call, "image") == held(before, mark_by(before, "ftrace"), "image")
    assert during["detours"]
    assert held(after, mark_by(after, "ftrace"), "memory") == info.nop


@ONCE
def test_addresses_are_those_of_the_guest_and_of_its_file(machine: Machine) -> None:
    seen = look(machine, "vfs_read+4")

    running = symbol_in_guest(machine, "vfs_read") + 4
    assert int(seen["site"], 16) == running
    in_file = xray("vfs_read+4", "--image", seen["image"])
    assert int(in_file["site"], 16) == running - int(seen["slide"], 16)
    assert Path(seen["image"]) == machine.kernel


@AMD64
def test_two_users_of_one_site_share_the_kernels_own_trampoline(machine: Machine) -> None:
    machine.run(f"{EVENTS.format('p schedule')}; echo function >current_tracer")
    seen = look(machine, "schedule")
    machine.run(f"cd /sys/kernel/tracing; echo nop >current_tracer; {OVER}")

    description = mark_by(seen, "ftrace")["says"]
    assert "it calls ftrace_regs_caller, for " in description
    assert "kprobe_ftrace_handler" in description
    assert "global_ops" in description


def test_a_native_breakpoint_in_a_function_is_named_and_its_slot_shown(
    machine: Machine, info: Facts
) -> None:
    # Where there is such a thing.
    machine.run("echo 0 >/proc/sys/debug/kprobes-optimization")
    offset = offset_of(machine, info.plain)
    before = look(machine, f"vfs_read+{offset}")
    machine.run(EVENTS.format(f"p:mid vfs_read+{offset}"))
    seen = look(machine, f"vfs_read+{offset}")
    machine.run(OVER)
    machine.run("echo 1 >/proc/sys/debug/kprobes-optimization")

    assert [mark["author"] for mark in before["marks"]] == []
    mark = mark_by(seen, "kprobe")
    assert f"breakpoint; event mid; before: {info.first}" in mark["says"]
    assert held(seen, mark, "memory") == info.breakpoint
    assert seen["probe"]["verdict"] == "refuse"
    assert "the guest's own kprobe is there at vfs_read+" in seen["probe"]["why"]
    (slot,) = seen["detours"]
    assert slot["text"][0]["bytes"] == info.plain


@AMD64
def test_a_native_optimised_kprobe_is_named_and_its_detour_shown(machine: Machine) -> None:
    offset = offset_of(machine, INFO["amd64"].plain)
    machine.run(EVENTS.format(f"p:mid vfs_read+{offset}"))
    looks: list[dict[str, Any]] = []

    def is_optimised() -> bool:
        # The kernel lists it so before its text is.
        looks.append(look(machine, f"vfs_read+{offset}"))
        return "a jump" in mark_by(looks[-1], "kprobe")["says"]

    was_optimised = becomes_true(is_optimised)
    listed = machine.run("cat /sys/kernel/debug/kprobes/list").output
    machine.run(OVER)

    assert was_optimised
    assert b"[OPTIMIZED]" in listed
    seen = looks[-1]
    mark = mark_by(seen, "kprobe")
    assert "optimised: a jump to its detour; event mid; before: 4157" in mark["says"]
    assert seen["text"][0]["bytes"][:4] == "4157"
    (detour,) = seen["detours"]
    assert "optimized_callback" in [row.get("name") for row in detour["text"]]
    assert detour["text"][-1]["name"] == f"vfs_read+{hex(int(mark['start'], 16) + 6 - start(seen))}"


def offset_of(machine: Machine, code: str) -> int:
    """Return where vfs_read's first instruction with these bytes is."""
    rows = look(machine, "vfs_read", "--function")["text"]
    at = next(int(row["address"], 16) for row in rows if row["bytes"] == code)
    return at - int(rows[0]["address"], 16)


def start(seen: dict[str, Any]) -> int:
    """Return where the function of a site begins."""
    return int(seen["site"], 16) - int(seen["name"].partition("+")[2] or "0", 16)


@ONCE
def test_our_probe_of_another_session_is_named_beside_it(machine: Machine, info: Facts) -> None:
    definition = "p:open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring flags=+0($arg3):x64"
    with kprobes.attach(str(machine.stub_address)) as session:
        session.probe(definition)
        with session.record() as trace:
            seen = look(machine, "do_sys_openat2")
            # The tracer never noticed.
            machine.run("cat /proc/version")
    after = look(machine, "do_sys_openat2")

    mark = mark_by(seen, "probe")
    assert mark["probe"] == "open"
    was = held(after, mark, "memory")
    assert was
    assert f"before: {was}" in mark["says"]
    assert definition in mark["says"]
    said = notes(seen, "code of our probe open")
    for words in (
        "open: dfd, s32, at 0x38",
        "open: where the text of path goes",
        "open: path: length and offset of its text, at 0x3c",
        "open: header: the cycle counter",
        "open: commit: the record is whole now",
        "fault-safe reader of the guest",
    ):
        assert words in said
    assert ("this CPU's reservation word" in said) is info.has_segment
    assert 'path="/proc/version"' in str(trace)
    assert held(after, mark_by(after, "ftrace"), "memory") == info.nop


@pytest.mark.parametrize("strategy", ["jump", "breakpoint"])
def test_our_probe_on_any_instruction_is_named_and_followed(
    machine: Machine, info: Facts, strategy: str
) -> None:
    site = f"vfs_read+{offset_of(machine, info.plain)}"
    arm = ("--arm", f"p:mid {site} count={info.register}", "--strategy", strategy)

    seen = look(machine, site, *arm)
    after = look(machine, site)

    mark = mark_by(seen, "probe")
    assert mark["says"].startswith(f"our probe mid, a {strategy}, of process")
    shown = {"jump": info.jump, "breakpoint": "int3"}[strategy]
    assert shown_at(seen, mark).startswith(shown)
    assert "mid: count, x64, at 0x28" in notes(seen, "code of our probe mid")
    back = [
        row.get("name", "")
        for row in seen["detours"][0]["text"]
        if row["text"].startswith(info.jump)
    ]
    assert any(name.startswith("vfs_read+") for name in back)
    assert [m["author"] for m in after["marks"]] == []
    assert {row["side"] for row in after["text"]} == {"both"}


@ONCE
def test_ours_and_the_guests_own_on_one_function_are_both_named(
    machine: Machine, info: Facts
) -> None:
    machine.run(EVENTS.format("p:own vfs_read"))
    with kprobes.attach(str(machine.stub_address)) as session:
        session.probe(
            f"p:ours vfs_read count=$arg3:u64 kept={info.kept}\np:more vfs_read file=$arg1"
        )
        with session.record():
            seen = look(machine, "vfs_read")
    machine.run(OVER)

    assert mark_by(seen, "probe")["probe"] in ("ours", "more")
    source, description, return_method = info.own
    assert description in mark_by(seen, source)["says"]
    assert {detour["title"].split()[0] for detour in seen["detours"]} == {"code", return_method}
    said = notes(seen, "code of our probe")
    # One instruction may store both.
    stored = [part.removeprefix("ours: ") for each in said for part in each.split("; ")]
    assert {"count, u64, at 0x28", "kept, x64, at 0x30"} <= {*stored}
    assert "more: file, x64, at 0x28" in said


def test_all_that_differs_from_the_file_in_many_functions_is_explained(machine: Machine) -> None:
    unknown = list[str]()
    for name in ("vfs_read", "schedule", "do_sys_openat2", "ksys_read", "try_to_wake_up"):
        seen = look(machine, name, "--function")
        unknown += [f"{name}: {m}" for m in seen["marks"] if m["author"] == "unknown"]

    assert unknown == []


def test_ways_out_in_a_guest_and_in_its_file_are_marked_and_proven(
    machine: Machine, info: Facts
) -> None:
    live = look(machine, "vfs_getattr", "--exits")
    in_file = xray("vfs_getattr", "--exits", "--image", str(machine.kernel))

    for seen in (live, in_file):
        found = seen["exits"]
        kinds = {each["kind"] for each in found["exits"]}
        assert (found["class"], kinds) == info.exits
        assert (found["reason"], found["at"]) == (None, None)
        marked = {row["address"] for row in seen["text"] if "exit: " in row.get("note", "")}
        assert marked == {each["address"] for each in found["exits"]}
    slide = int(live["slide"], 16)
    linked = [int(each["address"], 16) - slide for each in live["exits"]["exits"]]
    assert linked == [int(each["address"], 16) for each in in_file["exits"]["exits"]]


@ONCE
def test_ways_out_are_those_of_the_text_without_probes(machine: Machine) -> None:
    before = look(machine, "vfs_read", "--exits")
    with kprobes.attach(str(machine.stub_address)) as session:
        session.probe("\n".join(f"p:out{n} {e['where']}" for n, e in enumerate(_exits(before))))
        with session.record():
            during = look(machine, "vfs_read", "--exits")

    assert {m["author"] for m in during["marks"]} >= {"probe"}
    assert during["exits"] == before["exits"]


def _exits(seen: dict[str, Any]) -> list[dict[str, Any]]:
    # A place is SYM+OFF; the size after it is the kernel's way to print it.
    return [{**e, "where": e["where"].partition("/")[0]} for e in seen["exits"]["exits"]]


@pytest.mark.kernels("5.10", "7.x")
@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_a_kernels_file_needs_no_guest(suite: str, arch: str, info: Facts) -> None:
    seen = xray("vfs_read", "--function", "--image", str(kernel_image(suite=suite, arch=arch)))

    assert info.compiled in mark_by(seen, "ftrace")["says"]
    assert seen["slide"] is None
    assert {row["side"] for row in seen["text"]} == {None}
    description = [mark["says"] for mark in seen["marks"]]
    assert any(each.startswith("return: boot may") for each in description) is info.rewrites_returns


@ONCE
def test_words_on_a_terminal_have_colours_and_in_a_pipe_none(machine: Machine, info: Facts) -> None:
    command = [KPROBE, "xray", "schedule", "--image", str(machine.kernel)]

    plain = subprocess.run(command, capture_output=True, timeout=180, check=True).stdout
    bright = subprocess.run([*command, "--color", "always"], capture_output=True, check=True).stdout

    assert b"\x1b" not in plain
    assert b"\x1b[1mschedule\x1b[0m" in bright
    assert info.in_file.encode() in plain
