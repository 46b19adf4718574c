"""Definitions that every release takes, and those that none of its words can make."""

import pytest

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError
from kprobes.model.definition import INSTEAD, SyntheticFields
from kprobes.model.resolved import Resolved
from kprobes.resolve.tracefs_event import Version, to_kprobe_event
from tests.build.kernel import make_extra, make_probe
from tests.build.typed import resolved

OLD, MIDDLE, NEW = (5, 10), (6, 12), (7, 3)


def args(text: str, version: Version = OLD, *, head: str = "p vfs_read") -> str:
    line = to_kprobe_event(resolved(f"{head} {text}"), version, X86_64).line("g", "e")
    return line.split(" ", 2)[2]


@pytest.mark.parametrize(
    "text",
    [
        "a=%di b=%si:u32 c=$stack d=$stack12 e=$comm f=$comm:string",
        "a=+0(%si):ustring b=-8(+u16(%di)):x8[4] c=@jiffies d=@jiffies+8:u8",
        'a=\\12 b=\\"text" c=+0(%di):symbol d=%di:b4@2/32 e=+0(+8(%di)):string[2]',
    ],
)
def test_what_all_releases_know_stays_as_it_is(text: str) -> None:
    assert args(text) == text == args(text, NEW)


@pytest.mark.parametrize(
    ("written", "declaration"),
    [
        ("%di", "arg1=%di"),
        ("count", "count=%dx:u64"),
        ("$arg2", "buf=%si"),
        ("a=$arg2:u8", "a=%si:u8"),
        ("c", "c=%r8:s8"),
        ("a=+8($arg1):u16", "a=+8(%di):u16"),
        ("a=-8($arg1):u16", "a=-8(%di):u16"),
        ("a=file->f_mode", "a=+0(%di):u32"),
        ("a=file->f_path.dentry->d_name.len:x8", "a=+36(+24(%di)):x8"),
        ("a=file->f_path.dentry->d_name.name:string", "a=+0(+40(+24(%di))):string"),
        ("a=file->f_path.dentry->d_name.name:ustring", "a=+u0(+40(+24(%di))):string"),
        ("a=(file)%si->f_mode", "a=+0(%si):u32"),
        ("a=file->f_bits.three", "a=+33(%di):b3@1/32"),
        ("a=$COMM", "a=$comm:string"),
        ("a=buf:string", "a=+0(%si):string"),
        ("a=%di:char", "a=%di:u8"),
        ("a=%di:symstr", "a=%di:symbol"),
        ("a=+8(%di):char[3]", "a=+8(%di):u8[3]"),
        ("a=file->f_names[2]", "a=+120(%di)"),
        ("*file->f_path", "mnt=+16(%di) dentry=+24(%di)"),
    ],
)
def test_what_old_releases_do_not_know_becomes_what_they_do(written: str, declaration: str) -> None:
    assert args(written) == declaration


def test_all_parameters_become_registers_and_types() -> None:
    found = args("$arg*", head="p vfs_read")

    assert found == "file=%di buf=%si count=%dx:u64 mode=%cx:s32 c=%r8:s8"


def test_arguments_on_the_stack_are_slots_of_it() -> None:
    assert args("p8", head="p many") == "p8=$stack2:u64"


def test_a_char_stays_one_where_the_release_has_it() -> None:
    assert args("a=%di:char", MIDDLE) == "a=%di:char"


def test_the_returned_value_has_the_type_that_we_know() -> None:
    assert args("$retval", head="r vfs_read") == "arg1=$retval:u64"
    assert args("a=$retval:string", head="r many") == "a=+0($retval):string"


def test_a_return_probe_keeps_its_maxactive() -> None:
    declaration = to_kprobe_event(resolved("r7:back vfs_read"), OLD, X86_64)

    assert declaration.line("ours", "name") == "r7:ours/name vfs_read"


def test_places_are_spelled_as_they_were_written() -> None:
    for place in ("vfs_read", "vfs_read+4", "ext4:ext4_sync"):
        assert (
            to_kprobe_event(resolved(f"p {place}"), OLD, X86_64).line("g", "e") == f"p:g/e {place}"
        )


def test_arguments_at_the_return_are_the_kernels_where_it_has_them() -> None:
    assert args("file count", MIDDLE, head="r vfs_read") == "file=$arg1 count=$arg3:u64"
    assert args("a=file->f_mode", MIDDLE, head="r vfs_read") == "a=+0($arg1):u32"


@pytest.mark.parametrize(
    ("text", "since"),
    [
        ("r vfs_read ^count", "6.9"),
        ("r vfs_read a=^file->f_mode", "6.9"),
        ("p vfs_read pid=^$current->pid", "7.3"),
        ("p vfs_read a=^this_cpu_read(@runqueues)", "7.3"),
    ],
)
def test_what_cannot_be_spelled_is_refused_with_the_release_that_has_it(
    text: str, since: str
) -> None:
    with pytest.raises(DefinitionError) as caught:
        to_kprobe_event(resolved(text.replace("^", "")), OLD, X86_64)

    assert (caught.value.code, caught.value.column) == ("NOT_IN_RELEASE", text.index("^"))
    assert f"Linux {since} has them" in caught.value.hint
    assert "5.10" in caught.value.hint


def test_addresses_are_made_in_guests() -> None:
    with pytest.raises(DefinitionError, match="only guests have") as caught:
        to_kprobe_event(resolved("p vfs_read a=+4(&file->f_path)"), NEW, X86_64)

    assert caught.value.column == 13


@pytest.mark.parametrize(
    ("probe", "column"),
    [
        (make_probe("p f a=%di st=$stacktrace"), 13),
        (make_probe("p f a=%di st=$ustack"), 13),
        (make_extra("p f a=%di", SyntheticFields(stacktrace=True)), 0),
        (make_extra("p f a=%di", SyntheticFields(userstacktrace=True)), 0),
        (make_extra("p f a=%di", SyntheticFields(tgid=True)), 0),
        (make_extra("r f", SyntheticFields(duration=True)), 0),
    ],
)
def test_what_only_guests_have_is_refused_with_what_there_is(probe: Resolved, column: int) -> None:
    with pytest.raises(DefinitionError, match="only functions of guests") as caught:
        to_kprobe_event(probe, NEW, X86_64)

    assert (caught.value.code, caught.value.column) == ("NOT_IN_RELEASE", column)
    assert any(way in caught.value.hint for way in INSTEAD.values())


def test_the_running_task_is_the_kernels_where_it_has_one() -> None:
    assert args("pid=$current->pid", NEW) == "pid=$current->pid:s32"


def test_a_column_of_the_line_is_one_of_the_definition() -> None:
    text = "p:x vfs_read a=%di count b=+0(%si):u8"
    declaration = to_kprobe_event(resolved(text), OLD, X86_64)
    line = declaration.line("longer_group", "name")

    # The kernel's caret in a word that is the same, in one that is not, at the head, at the end.
    assert text[declaration.column(line, line.index("+0(")) :] == "+0(%si):u8"
    assert text[declaration.column(line, line.index("%dx")) :].startswith("count")
    assert declaration.column(line, line.index("name")) == 0
    assert declaration.column(line, len(line) + 1) == len(text) + 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("f vfs_read a=$arg1", "p:g/e vfs_read a=%di"),
        ("f vfs_read%return", "r:g/e vfs_read"),
        ("f vfs_read $retval", "r:g/e vfs_read arg1=$retval"),
    ],
)
def test_events_of_functions_are_written_as_kprobe_events(text: str, line: str) -> None:
    assert to_kprobe_event(resolved(text), OLD, X86_64).line("g", "e").startswith(line)


@pytest.mark.parametrize(
    ("written", "declaration"),
    [
        ("file flags", "file=$arg1 flags=$arg2:u32"),
        ("a=$arg2:x8 task=$comm", "a=$arg2:x8 task=$comm"),
        ("mode=file->f_mode", "mode=+0($arg1):u32"),
        ("name=file->f_path.dentry->d_name.name:string", "name=+0(+40(+24($arg1))):string"),
    ],
)
def test_what_a_tracepoint_gives_has_a_number(written: str, declaration: str) -> None:
    event = to_kprobe_event(resolved(f"t opened {written}"), NEW, X86_64)

    assert event.line("g", "e") == f"t:g/e opened {declaration}"


def test_tracepoints_are_told_to_later_releases_only() -> None:
    with pytest.raises(
        DefinitionError, match=r"Linux 6\.5 has them, this kernel is 6\.4"
    ) as caught:
        to_kprobe_event(resolved("t opened"), (6, 4), X86_64)

    assert (caught.value.code, caught.value.column) == ("NOT_IN_RELEASE", 0)
