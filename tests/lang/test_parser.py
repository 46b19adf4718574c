import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.listing import show
from kprobes.lang.parser import (
    parse_boot,
    parse_prefix,
    parse_source,
    parse_statement,
    parse_statements,
)
from kprobes.model.definition import Definition, Kind, Place, Span
from tests.build.definitions import REGISTERS, Wrong, caret_of, read


def test_a_whole_definition_is_read() -> None:
    found = read("p:my-grp/open   do_sys_openat2+0x10 fd=%di:s32 $comm # why")

    assert found.command == "p:my-grp/open do_sys_openat2+0x10 fd=%di:s32 $comm"
    assert (found.kind, found.group, found.event) == (Kind.ENTRY, "my-grp", "open")
    assert found.is_named
    assert found.place == Place(symbol="do_sys_openat2", offset=16, span=Span(14, 33))
    assert [arg.name for arg in found.args] == ["fd", "arg2"]


@pytest.mark.parametrize("text", ["p:x vfs_read", "probe:x vfs_read", "p_anything:x vfs_read"])
def test_words_between_letter_and_colon_say_nothing(text: str) -> None:
    assert read(text).event == "x"


def test_comments_and_blank_lines_around_a_definition_are_fine() -> None:
    assert read("# one\n\n p vfs_read # two\n").place.symbol == "vfs_read"


@pytest.mark.parametrize(
    ("text", "maxactive"),
    [
        ("r vfs_read", 0),
        ("r16 vfs_read", 16),
        ("r0x10:x vfs_read", 16),
        ("r010 vfs_read", 8),
        ("r4096 vfs_read", 4096),
        ("r" + "1".zfill(63) + " vfs_read", 1),
        ("rx3:x vfs_read", 0),
        ("r+3 vfs_read", 0),
    ],
)
def test_a_return_probe_may_say_how_many_calls_it_watches(text: str, maxactive: int) -> None:
    found = read(text)

    assert (found.kind, found.maxactive) == (Kind.RETURN, maxactive)


def test_what_perf_probe_prints_is_read() -> None:
    text = """\
p:probe/vfs_read _text+2503232 name=%di:u64 path=+0(+24(%si)):string
r4:probe/vfs_read__return vfs_read%return arg1=$retval
p:probe/ext4_sync_fs ext4:ext4_sync_fs+5 wait=%si:s32
"""

    found = parse_source(text, registers=REGISTERS)

    assert [(d.kind.value, d.group, d.event) for d in found] == [
        ("p", "probe", "vfs_read"),
        ("r", "probe", "vfs_read__return"),
        ("p", "probe", "ext4_sync_fs"),
    ]
    assert found[0].place.offset == 2503232


def test_the_boot_parameter_is_read() -> None:
    found = parse_boot("kprobe_event=p,vfs_read,$arg1;-:p_vfs_read_0;r:y,g", registers=REGISTERS)

    assert [show(d) for d in found] == ["r:kprobes/y g"]


def test_an_error_in_the_boot_parameter_notes_its_statement() -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_boot("p:a,f;p,f,%zz", registers=REGISTERS)

    assert caught.value.__notes__ == ["line 2"]
    assert (caught.value.command, caught.value.column) == ("p f %zz", 4)


def test_statements_are_definitions_and_deletions() -> None:
    found = parse_statements("p:x f\n-:x", registers=REGISTERS)

    assert isinstance(found[0], Definition)
    assert found[1] == parse_statement("-:x # gone", registers=REGISTERS)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("^x vfs_read", "BAD_STATEMENT"),
        ("^P vfs_read", "BAD_STATEMENT"),
        ("^: vfs_read", "BAD_STATEMENT"),
        ("p^", "NO_PLACE"),
        ("p:kprobes/foo^", "NO_PLACE"),
        ("p^3 vfs_read", "BAD_MAXACT_TYPE"),
        ("p^0:9x vfs_read%foo", "BAD_MAXACT_TYPE"),
        ("p3^", "NO_PLACE"),
        ("p^3 vfs_read%return", "BAD_MAXACT_TYPE"),
        ("r^0 vfs_read", "BAD_MAXACT"),
        ("r^3x:x vfs_read", "BAD_MAXACT"),
        ("r^5000000000 vfs_read", "BAD_MAXACT"),
        ("r^" + "1".zfill(64) + " vfs_read", "BAD_MAXACT"),
        ("r^4097 vfs_read", "MAXACT_TOO_BIG"),
        ("f^", "NO_PLACE"),
        ("f^5 vfs_read%return", "BAD_MAXACT"),
        ("f^x:a vfs_read", "BAD_MAXACT"),
        ("f vfs_read^%ret", "BAD_ADDR_SUFFIX"),
        ("f ^vfs_read+4", "BAD_PROBE_ADDR"),
        ("f ^0x1234", "BAD_PROBE_ADDR"),
        ("f vfs_read a=^%di", "BAD_VAR"),
        ("f vfs_read +8(^%di)", "BAD_VAR"),
        ("t^5 sched_switch", "BAD_MAXACT"),
        ("t sched^:sched_switch", "BAD_TP_NAME"),
        ("t sched^.sched_*", "BAD_TP_NAME"),
        ("t sched_switch^%return", "BAD_ADDR_SUFFIX"),
        ("t sched_switch prev a=^$retval:u8", "RETVAL_ON_PROBE"),
        ("t sched_switch ^%di", "BAD_VAR"),
        ("^e:x sched.sched_switch", "NOT_KPROBE"),
        ("^s:x int a", "NOT_KPROBE"),
        ("p ^/bin/sh:0x1234", "NOT_KPROBE"),
        ("^-:x", "IS_DELETION"),
    ],
)
def test_the_caret_marks_the_wrong_statement(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p:9x ^vfs_read+zz %zz", "BAD_PROBE_ADDR"),
        ("p:9x vfs_read^%foo", "BAD_ADDR_SUFFIX"),
        ("p:^9x vfs_read %zz", "BAD_EVENT_NAME"),
        ("p:^9x vfs_read" + " %di" * 129, "BAD_EVENT_NAME"),
        ("p vfs_read ^%zz %yy", "BAD_REG_NAME"),
    ],
)
def test_checks_come_in_the_kernels_order(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


def test_nothing_is_no_definition() -> None:
    assert caret_of(Wrong("^", "NO_STATEMENT")) == ("NO_STATEMENT", "^")


def test_two_definitions_are_one_too_many() -> None:
    with pytest.raises(DefinitionError) as caught:
        read("p vfs_read\np vfs_write")

    assert (caught.value.code, caught.value.command) == ("MANY_STATEMENTS", "p vfs_write")


def test_the_error_reads_as_the_kernels_error_log() -> None:
    with pytest.raises(DefinitionError) as caught:
        read("p   vfs_read  a=%rdi")

    assert str(caught.value).splitlines() == [
        "error: Invalid register name",
        "  Command: p vfs_read a=%rdi",
        "                        ^",
        "  did you mean %di?",
    ]


def test_a_file_has_a_definition_on_each_line() -> None:
    text = "# mine\np:a vfs_read\n\np:b vfs_write # two\r\n"

    assert [d.event for d in parse_source(text, registers=REGISTERS)] == ["a", "b"]


def test_an_error_in_a_file_notes_its_line() -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_source("p vfs_read\n\np vfs_read %zz\n", registers=REGISTERS)

    assert caught.value.__notes__ == ["line 3"]


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("p f %zz", 0),
        ("p f a=%di b=%zz", 1),
        ("p f a=%di b=%si c", 3),
        ("p:9 f a=%di", 0),
        ("p f a=%di $arg", 0),
        ("r9:x f+4 %di:u9", 0),
    ],
)
def test_what_stands_before_an_error_can_be_had(text: str, args: int) -> None:
    found = parse_prefix(text, registers=REGISTERS)

    assert found is not None
    read = found.read
    assert (read.command, read.place.symbol, len(read.args)) == (text, "f", args)


def test_words_for_parameters_after_an_error_can_be_had() -> None:
    found = parse_prefix("p f $arg1 a=%zz $arg9:nosuch b=$arg2 $arg*", registers=REGISTERS)

    assert found is not None
    assert [arg.text for arg in found.read.args] == ["$arg1"]
    assert [arg.text for arg in found.with_parameters.args] == ["$arg1", "$arg9", "$arg*"]


@pytest.mark.parametrize(
    ("word", "found"), [("args->f_inode-i_ino", "args"), ("a-b->c", ""), ("file->f_op:u9", "")]
)
def test_the_variable_of_a_walk_that_is_wrong_after_it_can_be_had(word: str, found: str) -> None:
    prefix = parse_prefix(f"r f {word}", registers=REGISTERS)

    assert prefix is not None
    assert [arg.text for arg in prefix.with_variable.args] == ([found] if found else [])


@pytest.mark.parametrize("text", ["", "p " + 4094 * "f", "p", "x f", "p3 f", "p f%foo", "-foo"])
def test_nothing_stands_before_an_error_in_the_place(text: str) -> None:
    assert parse_prefix(text, registers=REGISTERS) is None


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        (
            "e:o syscalls.sys_enter_openat dfd=$dfd file=+0($filename):ustring task=$comm",
            "p:o sys_openat dfd=dfd file=+0(filename):ustring task=$comm",
        ),
        ("e syscalls/sys_exit_read got=$ret:s64 $comm", "r sys_read got=$retval:s64 $comm"),
        ("e:g/o syscalls.sys_enter_read n=$count if count > 4096", "p:g/o sys_read n=count"),
    ],
)
def test_of_an_event_probe_it_is_said_what_serves(text: str, instead: str) -> None:
    with pytest.raises(DefinitionError, match="is an event probe; such as: ") as caught:
        read(text)

    line = caught.value.hint.partition("such as: ")[2]
    assert line.removesuffix(" --filter ...") == instead
    assert line.endswith(" --filter ...") == (" if " in text)
    read(instead)
