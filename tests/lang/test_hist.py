"""Hist triggers as they are read: what the kernel takes, lists and refuses."""

import pytest

from kprobes.column_hist import known_fields
from kprobes.errors import DefinitionError
from kprobes.lang.hist import parse_hist
from kprobes.model.hist import HistKind, SortKey, Special, trigger_text
from tests.build.ring import make_layout

LAYOUT = make_layout(
    1,
    ("u32", "s16", "ustring", "duration", "u8[4]", "x64"),
    event="read",
    names=("count", "got", "path", "duration", "head", "cpu"),
    can_fault=True,
)
KNOWN = known_fields(LAYOUT)


def check_mark(marked: str, text: str) -> None:
    """Find out whether a trigger is refused with a text, and the mark at its ``^``."""
    with pytest.raises(DefinitionError) as caught:
        parse_hist(marked.replace("^", ""), KNOWN)

    assert caught.value.text == text
    assert caught.value.column == marked.index("^")


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("keys=count", "hist:keys=count:vals=hitcount:sort=hitcount:size=2048"),
        (
            "keys=common_pid:vals=got.max,got:sort=got.descending",
            "hist:keys=common_pid:vals=hitcount,got.max,got:sort=got.descending:size=2048",
        ),
        (
            "keys=got:vals=got.avg:sort=got",
            "hist:keys=got:vals=hitcount,got.avg:sort=got:size=2048",
        ),
        ("hist:key=count", "hist:keys=count:vals=hitcount:sort=hitcount:size=2048"),
        (
            "hist:keys=count.log2,got:vals=got,count:sort=got.descending,count:size=200",
            "hist:keys=count.log2,got:vals=hitcount,got,count:sort=got.descending,count:size=256",
        ),
        (
            "hist:keys=common_pid.execname:val=hitcount:sort=common_pid",
            "hist:keys=common_pid.execname:vals=hitcount:sort=common_pid.execname:size=2048",
        ),
        (
            "keys=count.bucket=0x10:values=hitcount,hitcount.percent:NOHC:size=131072",
            "hist:keys=count.buckets=16:vals=hitcount.percent:sort=hitcount:size=131072:nohitcount",
        ),
        (
            "hist:name=x:keys=common_timestamp.usecs:sort=hitcount.ascending:clock=mono:pause",
            "hist:name=x:keys=common_timestamp.usecs:vals=hitcount:sort=hitcount:size=2048:clock=mono",
        ),
        (
            " hist:keys=CPU:vals=got.avg,count  if  got > 5 ",
            "hist:keys=common_cpu:vals=hitcount,got.avg,count:sort=hitcount:size=2048 if got > 5",
        ),
        ("keys=pid", "hist:keys=common_pid:vals=hitcount:sort=hitcount:size=2048"),
        (
            "keys=comm:vals=got.p50,got.p9.90:sort=got.p9.9.descending,got.p50",
            "hist:keys=comm:vals=hitcount,got.p50,got.p9.9:sort=got.p9.9.descending,got.p50:size=2048",
        ),
        (
            "keys=count:vals=got.p1,got.max:sort=got.max.ascending,count",
            "hist:keys=count:vals=hitcount,got.p1,got.max:sort=got.max,count:size=2048",
        ),
    ],
)
def test_it_is_listed_as_the_kernel_lists_it(text: str, listed: str) -> None:
    assert parse_hist(text, KNOWN).text == listed


def test_an_events_own_fields_come_first() -> None:
    assert parse_hist("keys=cpu", KNOWN).keys[0].source == 5
    assert parse_hist("keys=common_cpu", KNOWN).keys[0].name == "common_cpu"


def test_what_is_read_says_what_it_is() -> None:
    found = parse_hist("keys=path,duration,common_timestamp:sort=path,hitcount.descending", KNOWN)

    assert [key.kind for key in found.keys] == [
        HistKind.TEXT,
        HistKind.DURATION,
        HistKind.NUMBER,
    ]
    assert found.keys[2].source is Special.TIMESTAMP
    assert found.sort == (SortKey(index=1), SortKey(index=0, is_descending=True))
    assert parse_hist("keys=got", KNOWN).keys[0].is_signed


@pytest.mark.parametrize(
    ("marked", "text"),
    [
        ("hist:^vals=", "Empty assignment"),
        ("hist:keys=^foo", "Couldn't find field"),
        ("hist:keys=count.^foo", "Invalid field modifier"),
        ("hist:keys=count.^percent", "Invalid field modifier"),
        ("hist:keys=count.^execname", "Invalid field modifier"),
        ("^hist:keys=count.buckets", "Invalid field modifier"),
        ("hist:keys=count.buckets^=0", "Invalid field modifier"),
        ("hist:keys=count:vals=^got.log2", "Invalid field modifier"),
        ("hist:keys=count:vals=^got.sym", "Invalid field modifier"),
        ("hist:keys=count:vals=^bar", "Couldn't find field"),
        ("hist:keys=count:vals=got.^p0", "Invalid field modifier"),
        ("hist:keys=count:vals=got.^p100", "Invalid field modifier"),
        ("hist:keys=count:vals=got.^p", "Invalid field modifier"),
        ("hist:keys=count:vals=got.^pN", "Invalid field modifier"),
        ("hist:keys=^count.p50", "Invalid field modifier"),
        ("hist:keys=count:vals=^path.p50", "Field cannot be a value"),
        ("hist:keys=count:vals=got.p50:sort=got.^p99", "Invalid sort modifier"),
        ("hist:keys=got.^log2:sort=got.log2", "Invalid sort modifier"),
        ("hist:keys=count:sort=^foo", "Sort field must be a key or a val"),
        ("hist:keys=count:sort=count.^up", "Invalid sort modifier"),
        ("hist:keys=count:^sort=,count", "Empty sort field"),
        ("hist:keys=count:^sort=count,got,hitcount", "Too many sort fields (Max = 2)"),
        ("^hist:keys=count:nohitcount", "Non-hitcount value is required for 'nohitcount'"),
        ("^hist:keys=count:clear", "Can't clear or continue a nonexistent hist trigger"),
        # Ours: the kernel has no words for them, or cannot be asked of a recording.
        ("^hist:vals=count", "A hist trigger needs keys"),
        ("hist:keys=count,got,path,^duration", "Too many keys (Max = 3)"),
        ("hist:keys=path:vals=count,got,^duration", "Too many values (Max = 2)"),
        ("hist:keys=count:size=^5", "Invalid size of the table"),
        ("hist:keys=count:size=^1000000", "Invalid size of the table"),
        ("hist:keys=count:^sometimes", "Unknown word in a hist trigger"),
        ("hist:keys=count ^if", "A filter is written: if FIELD OPERATOR VALUE"),
        ("hist:keys=^path.hex", "Field cannot be a key"),
        ("hist:keys=count:vals=^path", "Field cannot be a value"),
        ("hist:keys=^stacktrace", "Field is not recorded"),
        ("hist:keys=^tgid", "Field is not recorded"),
        ("hist:keys=^head", "Field is not recorded"),
        ("hist:keys=count.^syscall", "Field is not recorded"),
        ("^hist:keys=count:onmax(got)", "No action found"),
    ],
)
def test_the_mark_stands_where_the_kernels_does(marked: str, text: str) -> None:
    check_mark(marked, text)


def test_short_words_are_the_kernels_names() -> None:
    assert trigger_text(["comm", "pid", "size.log2"], sort="size") == (
        "hist:keys=comm,common_pid,size.log2:sort=size:size=16384"
    )
    assert trigger_text(["func"], ["got", "pid.max"], sort="pid.max.descending", size=256) == (
        "hist:keys=function:vals=got,common_pid.max:sort=common_pid.max.descending:size=256"
    )


STACKS = known_fields(
    make_layout(1, ("stacktrace", "u8", "stacktrace"), names=("st", "n", "common_stacktrace"))
)


@pytest.mark.parametrize(
    ("key", "listed", "depth"),
    [
        ("stack", "stack", 0),
        ("common_stacktrace", "common_stacktrace", 16),
        ("stacktrace", "common_stacktrace", 16),
        ("STACKTRACE", "common_stacktrace", 16),
        ("st.stacktrace", "st.stacktrace", 16),
    ],
)
def test_a_stack_is_a_key_whole_or_as_the_kernel_cuts_it(key: str, listed: str, depth: int) -> None:
    found = parse_hist(f"keys={key}", STACKS)

    assert f"keys={listed}:" in found.text
    assert (found.keys[0].kind, found.keys[0].width) == (HistKind.STACK, depth)


@pytest.mark.parametrize(
    ("trigger", "says"),
    [
        ("keys=st", "a stack is written st.stacktrace"),
        ("keys=stack.stacktrace", "a stack is written stack"),
        ("keys=stack.hex", "a stack is written stack"),
        ("keys=n.stacktrace", "it is no stack"),
        ("keys=n:vals=stack", "only numbers can be summed up"),
        ("keys=n:vals=n.stacktrace", "there are"),
    ],
)
def test_a_stack_is_nothing_else(trigger: str, says: str) -> None:
    with pytest.raises(DefinitionError, match=says):
        parse_hist(trigger, STACKS)


def test_an_event_without_its_stack_says_how_to_have_it() -> None:
    with pytest.raises(DefinitionError, match="-O stacktrace"):
        parse_hist("keys=stack", KNOWN)
