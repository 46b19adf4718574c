"""Text is compared with what real guests printed.

Where tests/golden/trace comes from: ``cat /sys/kernel/tracing/trace`` under QEMU 7.2 TCG, 2 vCPUs,
busybox userland, in Debian's 5.10.0-46-cloud-amd64, 6.1.0-56-cloud-amd64, 6.12.95+deb12-cloud-amd64
and 7.2.13+deb14-cloud-amd64. Headers are whole, with the counts of the file they come from; of the
events one line was kept for every flag combination and every kind of argument, of tasks, the idle
task, interrupts and soft interrupts.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.model.events import Batch, Events
from kprobes.model.text_options import text_options
from kprobes.sinks import FORMATS
from kprobes.sinks.names import WINDOW, TraceSource
from kprobes.sinks.text import TextSink, reboot_mark
from tests.build.events import Row, events_of_trace, make_batch, make_events
from tests.build.reference import packed
from tests.build.ring import Value, make_layout

GOLDEN = Path(__file__).parents[1] / "golden" / "trace"
NEW = TraceSource(version=(6, 1), cpus=2)
NOTHING = make_events([])


class Terminal(io.BytesIO):
    """A stream that people see."""

    def isatty(self) -> bool:
        return True


def lines_of(events: Events, source: TraceSource = NEW) -> list[bytes]:
    out = io.BytesIO()
    TextSink(out, source).write(events)
    return [line for line in out.getvalue().split(b"\n") if not line.startswith(b"#")][:-1]


STACK = packed([0xFFFF_FFFF_8100_0010, 0xFFFF_FFFF_8100_0020])


def named(addr: int) -> str:
    return f"f{addr & 0xFF:x}+0x4/0x9 [\x1bmod]"


def test_a_field_that_is_a_stack_is_below_the_line() -> None:
    layout = make_layout(1, ("stacktrace", "u8", "stacktrace"), names=("st", "n", "more"))
    rows = [Row(ts=5_000_000_000, values=(STACK, 7, b""))]

    out = lines_of(make_events([make_batch(layout, rows)]), replace(NEW, symbol_at=named))

    assert [line.split(b": ", 2)[-1] for line in out] == [
        b"(vfs_read+0x0/0x310) n=7 st=STACK:",
        b"=> f10+0x4/0x9 [\x1bmod]",
        b"=> f20+0x4/0x9 [\x1bmod] more=STACK:",
    ]


def test_the_stack_of_an_event_is_an_entry_of_its_own() -> None:
    layout = make_layout(1, ("u8", "stacktrace"), names=("n", "common_stacktrace"))
    rows = [Row(ts=n, cpu=n, values=(n, STACK)) for n in (1, 2)]

    out = lines_of(make_events([make_batch(layout, rows)]), replace(NEW, symbol_at=named))

    assert len(out) == 8
    head = out[4].partition(b"e1: ")[0]
    assert out[4:] == [
        head + b"e1: (vfs_read+0x0/0x310) n=2",
        head + b"<stack trace>",
        b" => f10",
        b" => f20",
    ]


def test_the_stack_of_a_program_is_an_entry_of_its_own_after_the_kernels() -> None:
    types, names = ("stacktrace", "userstacktrace"), ("common_stacktrace", "common_userstacktrace")
    program = packed([0x7F12_3456_789A, 0x40_1000])
    rows = [Row(values=(STACK, program)), Row(ts=1, values=(STACK, b""))]
    batch = make_batch(make_layout(1, types, names=names), rows)

    out = lines_of(make_events([batch]), replace(NEW, symbol_at=named))[-11:]

    head = out[0].partition(b"e1: ")[0]
    assert out[:7] == [
        head + b"e1: (vfs_read+0x0/0x310)",
        head + b"<stack trace>",
        b" => f10",
        b" => f20",
        head + b"<user stack trace>",
        b" =>  <00007f123456789a>",
        b" =>  <0000000000401000>",
    ]
    # One of a task that is the kernel's has none.
    assert b"user" not in b"".join(out[7:])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["sym-userobj"], [b" => /bin/a\x1b[+0x9a] of 7", b" =>  <0000000000401000>"]),
        (
            ["sym-userobj", "sym-addr"],
            [b" => /bin/a\x1b[+0x9a] of 7 <00007f123456789a>", b" =>  <0000000000401000>"],
        ),
    ],
)
def test_a_programs_stack_shows_the_file_of_each_address(
    options: Sequence[str], expected: list[bytes]
) -> None:
    def program_at(pid: int, addr: int) -> bytes | None:
        return b"/bin/a\x1b[+%#x] of %d" % (addr & 0xFF, pid) if addr > 1 << 32 else None

    layout = make_layout(1, ("userstacktrace",), names=("common_userstacktrace",))
    row = Row(pid=7, values=(packed([0x7F12_3456_789A, 0x40_1000]),))
    source = replace(NEW, program_at=program_at, options=text_options(options))

    assert lines_of(make_events([make_batch(layout, [row])]), source)[-2:] == expected
    screen = Terminal()
    TextSink(screen, source).write(make_events([make_batch(layout, [row])]))
    assert screen.getvalue().split(b"\n")[-3] == expected[0].replace(b"\x1b", b"\\x1b")


def test_on_a_terminal_a_stack_is_lines_and_its_names_move_no_cursor() -> None:
    layout = make_layout(1, ("stacktrace", "string"), names=("st", "s"))
    out = Terminal()

    sink = TextSink(out, replace(NEW, symbol_at=named))
    sink.write(make_events([make_batch(layout, [Row(values=(STACK, b"a\n => x"))])]))

    text = out.getvalue().rpartition(b"#\n")[-1].split(b"\n")[-4:]
    assert text[0].endswith(b's="a\\n => x" st=STACK:')
    assert text[1:] == [b"=> f10+0x4/0x9 [\\x1bmod]", b"=> f20+0x4/0x9 [\\x1bmod]", b""]


@pytest.mark.parametrize("release", ["5.10", "6.1", "6.12", "7.2"])
def test_a_real_trace_file_comes_out_byte_for_byte(release: str) -> None:
    text = (GOLDEN / f"{release}.txt").read_bytes()
    counted = re.search(rb"written: (\d+)/\d+   #P:(\d+)", text)
    assert counted is not None
    major, _, minor = release.partition(".")
    lines = [line for line in text.split(b"\n") if line and not line.startswith(b"#")]
    out = io.BytesIO()

    source = TraceSource(
        version=(int(major), int(minor)), cpus=int(counted[2]), entries=int(counted[1])
    )
    sink = TextSink(out, source)
    sink.write(events_of_trace(lines))
    sink.close()

    assert len(lines) >= 30
    assert out.getvalue() == text


def test_on_a_terminal_a_string_forges_no_line_and_moves_no_cursor() -> None:
    layout = make_layout(1, ("string",), event="open", where="f+0x0/0x10", names=("path",))
    row = Row(comm=b"a\x1b[2J", values=(b"x\n sh-1 [000]\xff\x9b",))
    events = make_events([make_batch(layout, [row])])
    screen = Terminal()
    TextSink(screen, NEW).write(events)

    assert b"a\x1b[2J-1 " in lines_of(events)[0]
    (line,) = [line for line in screen.getvalue().splitlines() if line[:1] != b"#"]
    assert line.lstrip().startswith(rb"a\x1b[2J-1 ")
    assert line.endswith(rb'path="x\n sh-1 [000]\xff\x9b"')


def test_numbers_print_as_their_type_says() -> None:
    types = ("u8", "s8", "x8", "u64", "s64", "x64", "u16", "s16", "x32", "comm")
    names = tuple("abcdefghij")
    layout = make_layout(1, types, event="num", where="vfs_read+0x0/0x310", names=names)
    top = (1 << 64) - 1
    values = (255, -1, 255, top, -1, top, 65535, -32768, 0, None)

    (line,) = lines_of(make_events([make_batch(layout, [Row(values=values)])]))

    assert line.endswith(
        b": num: (vfs_read+0x0/0x310) a=255 b=-1 c=0xff d=18446744073709551615 e=-1 "
        b'f=0xffffffffffffffff g=65535 h=-32768 i=0x0 j="sh"'
    )


def test_a_faulted_number_prints_zero_and_a_faulted_string_says_so() -> None:
    layout = make_layout(1, ("u64", "x32", "ustring", "s16"), can_fault=True)
    rows = [Row(values=(None, None, None, None)), Row(values=(7, 7, b"7", 7))]

    lines = lines_of(make_events([make_batch(layout, rows)]))

    assert [line.partition(b") ")[2] for line in lines] == [
        b"a0=0 a1=0x0 a2=(fault) a3=0",
        b'a0=7 a1=0x7 a2="7" a3=7',
    ]


def test_times_of_a_clock_that_counts_no_nanoseconds_are_written_as_they_are() -> None:
    layout = make_layout(1, ("u64",))
    rows = [Row(ts=1_234_567, values=(1,)), Row(ts=12_345_678_901_234, values=(2,))]

    lines = lines_of(
        make_events([make_batch(layout, rows)]), TraceSource(version=(6, 1), cpus=2, has_ns=False)
    )

    assert [line.partition(b"] ")[2].partition(b": ")[0] for line in lines] == [
        b".....      1234567",
        b"..... 12345678901234",
    ]


def test_strings_are_written_raw() -> None:
    layout = make_layout(1, ("string",))
    row = Row(values=(b'%s a\x01"\xe9\n%',))

    out = io.BytesIO()
    TextSink(out, NEW).write(make_events([make_batch(layout, [row])]))

    assert out.getvalue().endswith(b'a0="%s a\x01"\xe9\n%"\n')


@pytest.mark.parametrize(
    ("ts", "shown"),
    [
        (0, b"    0.000000"),
        (499, b"    0.000000"),
        (500, b"    0.000001"),
        (999_999_500, b"    1.000000"),
        (123_456_789_012_345_678, b"123456789.012346"),
    ],
)
def test_time_is_rounded_to_microseconds_as_the_kernel_does(ts: int, shown: bytes) -> None:
    (line,) = lines_of(make_events([make_batch(make_layout(1), [Row(ts=ts)])]))

    assert line.split(b"..... ")[1].startswith(shown + b": e1: (")


def test_events_of_several_kinds_are_written_in_their_order() -> None:
    one, two = make_layout(1, ("u64",)), make_layout(2)
    batches = [
        make_batch(one, [Row(ts=i * 1000, values=(i,)) for i in (3, 1)]),
        make_batch(two, [Row(ts=2000), Row(ts=4000)]),
    ]

    lines = lines_of(make_events(batches, [(0, 1), (1, 0), (0, 0), (1, 1)]))

    assert [line.split(b": ")[0][-6:] for line in lines] == [
        b"000001",
        b"000002",
        b"000003",
        b"000004",
    ]
    assert [line.split(b": ")[1] for line in lines] == [b"e1", b"e2", b"e1", b"e2"]


@pytest.mark.parametrize("length", [1, 3, 10])
def test_each_line_names_its_task_however_many_follow_each_other(length: int) -> None:
    rows = [Row(ts=n * 1000, pid=n // length, comm=b"task-%d" % (n // length)) for n in range(40)]

    lines = lines_of(make_events([make_batch(make_layout(1), rows)]))

    # What pid 0 is called is another matter.
    names = [line.split(b" [")[0].strip() for line in lines[length:]]
    assert names == [b"task-%d-%d" % (n // length, n // length) for n in range(length, 40)]


def test_more_events_than_a_window_lose_none() -> None:
    count = 2 * WINDOW + 3
    layout = make_layout(1, ("u32",))
    batch = make_batch(layout, [Row(values=(i,), pid=i % 40_000 + 1) for i in range(count)])

    lines = lines_of(make_events([batch]))

    assert [int(line.rpartition(b"=")[2]) for line in lines] == list(range(count))


def test_the_counts_are_put_in_at_the_end_of_a_file(tmp_path: Path) -> None:
    batch = make_batch(make_layout(1), [Row(ts=i) for i in range(12)])
    path = tmp_path / "trace"

    with path.open("w+b") as out:
        sink = TextSink(out, NEW)
        sink.write(make_events([batch]))
        streaming = path.read_bytes()
        sink.write(make_events([batch]))
        sink.close()

    known = io.BytesIO()
    whole = TextSink(known, TraceSource(version=(6, 1), cpus=2, entries=24))
    whole.write(make_events([batch]))
    whole.write(make_events([batch]))
    assert b"entries-written: 0/0   #P:2\n" in streaming
    assert path.read_bytes() == known.getvalue()


def test_counts_are_put_into_a_file_longer_than_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kprobes.sinks.text._BLOCK", 64)
    batch = make_batch(make_layout(1), [Row(ts=i * 1000) for i in range(150)])
    patched, known = io.BytesIO(b"before"), io.BytesIO()
    patched.seek(6)

    sink = TextSink(patched, NEW)
    sink.write(make_events([batch]))
    sink.close()
    TextSink(known, TraceSource(version=(6, 1), cpus=2, entries=150)).write(make_events([batch]))

    assert patched.getvalue() == b"before" + known.getvalue()


class Pipe(io.BytesIO):
    """An output that cannot go back."""

    def seekable(self) -> bool:
        return False

    def warn(self) -> int:
        raise io.UnsupportedOperation


def test_a_pipe_keeps_the_counts_of_an_empty_buffer() -> None:
    out = Pipe()

    sink = TextSink(out, NEW)
    sink.write(make_events([make_batch(make_layout(1), [Row()])]))
    sink.close()

    assert out.getvalue().split(b"\n")[2] == b"# entries-in-buffer/entries-written: 0/0   #P:2"


def test_no_events_are_a_header_and_it_comes_once() -> None:
    out = io.BytesIO()

    sink = FORMATS["text"](out, NEW)
    sink.write(NOTHING)
    sink.write(NOTHING)
    sink.close()

    assert out.getvalue().count(b"# tracer: nop\n") == 1
    assert out.getvalue().count(b"\n") == 12


def test_a_duration_that_could_not_be_measured_is_unknown() -> None:
    layout = make_layout(1, ("duration",), names=("duration",), has_caller=True)
    rows = [Row(values=(took,)) for took in (7, None)]

    lines = lines_of(make_events([make_batch(layout, rows)]), NEW)

    assert [line.rpartition(b" ")[2] for line in lines] == [b"duration=7", b"duration=?"]


def _returned(callers: list[int], source: TraceSource) -> list[bytes]:
    layout = make_layout(
        1,
        ("x32", "duration", "symbol"),
        event="back",
        names=("arg1", "duration", "exit"),
        where="do_sys_openat2+0x4/0x180",
        has_caller=True,
    )
    rows = [Row(values=(3, 1500, 0), caller=caller) for caller in callers]
    return [
        line.partition(b"back: ")[2]
        for line in lines_of(make_events([make_batch(layout, rows)]), source)
    ]


def test_a_return_prints_its_caller_and_its_function_as_the_kernel_does() -> None:
    places = {
        0x10: "do_syscall_64+0x40/0x90",
        0x20: "ext4_sync+0x1/0x40 [ext4]",
        0x30: "arch_rethook_trampoline+0x0/0x60",
        0x31: "arch_rethook_trampoline+0x1/0x60",
    }
    source = TraceSource(
        version=(6, 1),
        cpus=1,
        trampoline=0x30,
        symbol_at=lambda addr: places.get(addr, f"{addr:#x}"),
    )

    lines = _returned([0x10, 0x20, 0x30, 0x31, 0x99, 0], source)

    shown = [line.removesuffix(b" arg1=0x3 duration=1500 exit=0x0") for line in lines]
    assert shown == [
        b"(do_syscall_64+0x40/0x90 <- do_sys_openat2)",
        b"(ext4_sync+0x1/0x40 [ext4] <- do_sys_openat2)",
        b"([unknown/kretprobe'd] <- do_sys_openat2)",
        b"(arch_rethook_trampoline+0x1/0x60 <- do_sys_openat2)",
        b"(0x99 <- do_sys_openat2)",
        b"(0 <- do_sys_openat2)",
    ]


def test_a_trampoline_without_a_name_for_what_it_does_is_a_symbol() -> None:
    source = TraceSource(
        version=(5, 10), cpus=1, symbol_at=lambda _: "kretprobe_trampoline+0x0/0x50"
    )

    (line,) = _returned([0x30], source)

    assert line.startswith(b"(kretprobe_trampoline+0x0/0x50 <- do_sys_openat2)")


def test_a_reboot_is_a_comment_of_one_line() -> None:
    assert reboot_mark("6.1\n") == b"# the guest was rebooted: Linux 6.1\\n\n"


def text_of(events: Events, *options: str) -> list[bytes]:
    source = replace(NEW, symbol_at=named, options=text_options(options))
    return lines_of(events, source)


def row(*values: Value, caller: int = 0) -> Row:
    return Row(comm=b"cat", pid=137, cpu=1, ts=6_966_752_000, values=values, caller=caller)


READ = make_batch(make_layout(1, ("u8",), names=("n",)), [row(7)])
RETURNED = make_batch(make_layout(2, has_caller=True), [row(caller=0xFFFF_FFFF_8100_0010)])
WALKED = make_batch(make_layout(1, ("stacktrace",), names=("common_stacktrace",)), [row(STACK)])
OF_PROCESS = make_batch(
    make_layout(1, ("s32", "u8"), names=("common_tgid", "n")), [row(130, 7), row(0, 7)]
)
HEAD = b"             cat-137     %b[001] .....     6.966752: e1: (vfs_read+0x0/0x310) n=7"


@pytest.mark.parametrize(
    ("batch", "options", "lines"),
    [
        (READ, ["nocontext-info"], [b"e1: (vfs_read+0x0/0x310) n=7"]),
        (
            READ,
            ["noirq-info"],
            [b"             cat-137     [001]      6.966752: e1: (vfs_read+0x0/0x310) n=7"],
        ),
        (READ, ["raw"], [b"137 1 6966752000 type: 1"]),
        (
            READ,
            ["sym-addr", "nocontext-info"],
            [b"e1: (vfs_read+0x0/0x310 <ffffffff81000040>) n=7"],
        ),
        (
            RETURNED,
            ["sym-addr", "nocontext-info"],
            [b"e2: (f10+0x4/0x9 [\x1bmod] <ffffffff81000010> <- vfs_read <ffffffff81000080>)"],
        ),
        (WALKED, ["nocontext-info"], [b"<stack trace>", b" => f10", b" => f20"]),
        (
            WALKED,
            ["sym-offset", "nocontext-info"],
            [b"<stack trace>", b" => f10+0x4/0x9 [\x1bmod]", b" => f20+0x4/0x9 [\x1bmod]"],
        ),
        (
            WALKED,
            ["sym-addr", "nocontext-info"],
            [b"<stack trace>", b" => f10 <ffffffff81000010>", b" => f20 <ffffffff81000020>"],
        ),
        (WALKED, ["raw", "nocontext-info"], [b"type: 1", b"type: 4"]),
        (
            OF_PROCESS,
            ["record-tgid"],
            [HEAD % b"(    130) ", HEAD % b"(-------) "],
        ),
        (
            OF_PROCESS,
            ["nocontext-info"],
            [
                b"e1: (vfs_read+0x0/0x310) common_tgid=130 n=7",
                b"e1: (vfs_read+0x0/0x310) common_tgid=0 n=7",
            ],
        ),
        (
            READ,
            ["fields", "nocontext-info"],
            [b"e1: __probe_ip=f40+0x4/0x9 [\x1bmod] (-2130706368) n=(7)"],
        ),
    ],
)
def test_trace_options_change_the_text_as_in_the_kernel(
    batch: Batch, options: list[str], lines: list[bytes]
) -> None:
    assert text_of(make_events([batch]), *options)[-len(lines) :] == lines


def test_a_caller_that_is_none_has_no_address() -> None:
    batch = make_batch(make_layout(2, has_caller=True), [Row(caller=0)])

    (line,) = text_of(make_events([batch]), "sym-addr", "nocontext-info")

    assert line == b"e2: (0 <- vfs_read <ffffffff81000080>)"


def test_functions_of_the_function_tracer_have_their_callers_or_not() -> None:
    layout = make_layout(1, ("symbol", "symbol"), names=("ip", "parent_ip"), event="function")
    layout = replace(layout, group="ftrace", print_fmt='"%ps <-%ps", REC->ip, REC->parent_ip')
    events = make_events([make_batch(layout, [row(0xFFFF_FFFF_8100_0010, 0xFFFF_FFFF_8100_0020)])])

    assert text_of(events, "nocontext-info") == [b"f10 <-f20"]
    assert text_of(events, "nocontext-info", "noprint-parent") == [b"f10"]
    assert text_of(events, "nocontext-info", "sym-offset") == [
        b"f10+0x4/0x9 [\x1bmod] <-f20+0x4/0x9 [\x1bmod]"
    ]


@pytest.mark.parametrize("options", [["verbose"], ["nocontext-info"]])
def test_where_no_columns_are_named_no_events_are_counted(options: list[str]) -> None:
    out = io.BytesIO()
    sink = TextSink(out, replace(NEW, options=text_options(options)))

    sink.write(make_events([READ]))
    sink.close()

    assert out.getvalue().startswith(b"# tracer: nop\n#\n")
    assert out.getvalue().count(b"#") == 2


HEADER_TGID = """\
#
#                                          _-----=> irqs-off/BH-disabled
#                                         / _----=> need-resched
#                                        | / _---=> hardirq/softirq
#                                        || / _--=> preempt-depth
#                                        ||| / _-=> migrate-disable
#                                        |||| /     delay
#           TASK-PID       TGID    CPU#  |||||  TIMESTAMP  FUNCTION
#              | |           |       |   |||||     |         |
"""
HEADER_TGID_OLD = """\
#
#                                          _-----=> irqs-off
#                                         / _----=> need-resched
#                                        | / _---=> hardirq/softirq
#                                        || / _--=> preempt-depth
#                                        ||| /     delay
#           TASK-PID       TGID    CPU#  ||||   TIMESTAMP  FUNCTION
#              | |           |       |   ||||      |         |
"""
HEADER_TGID_NO_IRQ = """\
#
#           TASK-PID       TGID    CPU#     TIMESTAMP  FUNCTION
#              | |           |       |         |         |
"""
HEADER_NO_IRQ = """\
#
#           TASK-PID     CPU#     TIMESTAMP  FUNCTION
#              | |         |         |         |
"""
"""Headers of Debian's 7.2.13+deb14-cloud-amd64, 6.1.0-56- and 5.10.0-46-cloud-amd64."""


@pytest.mark.parametrize(
    ("options", "version", "header"),
    [
        (["record-tgid"], (7, 2), HEADER_TGID),
        (["record-tgid"], (5, 10), HEADER_TGID_OLD),
        (["record-tgid", "noirq-info"], (6, 1), HEADER_TGID_NO_IRQ),
        (["noirq-info"], (5, 10), HEADER_NO_IRQ),
    ],
)
def test_columns_are_named_as_by_the_kernel(
    options: list[str], version: tuple[int, int], header: str
) -> None:
    out = io.BytesIO()

    TextSink(out, replace(NEW, version=version, options=text_options(options))).write(NOTHING)

    counts = "# entries-in-buffer/entries-written: 0/0   #P:2\n"
    assert out.getvalue().decode() == f"# tracer: nop\n#\n{counts}{header}"
