"""Triggers as text: what the kernel takes, and where it says EINVAL."""

import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.trigger import TriggerChange, names_target, parse_trigger
from kprobes.model.codes import TriggerCode
from kprobes.model.trigger import Command, Trigger


@pytest.mark.parametrize(
    ("text", "trigger"),
    [
        ("traceon", Trigger(command=Command.TRACEON)),
        ("  traceoff:5 ", Trigger(command=Command.TRACEOFF, count=5)),
        ("traceoff:0x10", Trigger(command=Command.TRACEOFF, count=16)),
        ("traceoff:0", Trigger(command=Command.TRACEOFF, count=0)),
        ("traceoff 5", Trigger(command=Command.TRACEOFF, count=5)),
        ("traceoff:", Trigger(command=Command.TRACEOFF)),
        ("stacktrace:3:4", Trigger(command=Command.STACKTRACE, count=3)),
        ("snapshot:1  if  a > 1 ", Trigger(command=Command.SNAPSHOT, count=1, filter="a > 1")),
        ("traceoff:if a > 1", Trigger(command=Command.TRACEOFF, filter="a > 1")),
        ("stop if a > 1", Trigger(command=Command.STOP, filter="a > 1")),
        ("enable_event:g:e", Trigger(command=Command.ENABLE_EVENT, target="g:e")),
        (
            "disable_event:g:e:7 if a",
            Trigger(command=Command.DISABLE_EVENT, target="g:e", count=7, filter="a"),
        ),
        ("enable_hist:g:e:2", Trigger(command=Command.ENABLE_HIST, target="g:e", count=2)),
        (
            "hist:keys=a.log2:vals=b if c > 1",
            Trigger(command=Command.HIST, text="keys=a.log2:vals=b if c > 1"),
        ),
        ("hist", Trigger(command=Command.HIST)),
    ],
)
def test_a_trigger_is_read_as_the_kernel_reads_it(text: str, trigger: Trigger) -> None:
    assert parse_trigger(text) == TriggerChange(trigger=trigger)


@pytest.mark.parametrize(
    "text", ["!traceoff", "!traceoff:3", "!traceoff:count=3 if a > 1", "!traceoff x"]
)
def test_what_goes_is_named_by_its_kind_alone(text: str) -> None:
    found = parse_trigger(text)

    assert found.is_removal
    assert (found.trigger.kind, found.trigger.count) == (("tracing",), None)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("^", TriggerCode.UNKNOWN_COMMAND),
        ("^tracoff", TriggerCode.UNKNOWN_COMMAND),
        ("!^tracoff", TriggerCode.UNKNOWN_COMMAND),
        ("traceoff:^x", TriggerCode.BAD_IF),
        ("traceoff ^when a > 1", TriggerCode.BAD_IF),
        ("traceoff ^if", TriggerCode.BAD_IF),
        ("traceoff:5 ^a > 1", TriggerCode.BAD_IF),
        ("traceoff:^5x", TriggerCode.BAD_COUNT),
        ("traceoff:^9999999999999999999999", TriggerCode.BAD_COUNT),
        ("enable_event^", TriggerCode.NO_TARGET),
        ("enable_event:^g", TriggerCode.NO_TARGET),
        ("enable_event:^:e", TriggerCode.NO_TARGET),
        ("disable_event:^g: if a > 1", TriggerCode.NO_TARGET),
        ("enable_event:g:e:^x", TriggerCode.BAD_COUNT),
        ("enable_event:g:e:^", TriggerCode.BAD_COUNT),
        ("!enable_event^", TriggerCode.NO_TARGET),
    ],
)
def test_the_caret_marks_what_is_wrong(marked: str, code: TriggerCode) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_trigger(marked.replace("^", "", 1))

    assert (caught.value.code, caught.value.column) == (code.name, marked.index("^"))
    assert caught.value.hint


def test_of_a_hist_trigger_that_goes_the_text_says_which() -> None:
    trigger = Trigger(command=Command.HIST, text="keys=a")

    assert parse_trigger("!hist:keys=a") == TriggerChange(trigger=trigger, is_removal=True)


def test_what_names_another_event_is_told() -> None:
    assert names_target("!disable_event:g:e")
    assert not names_target("traceoff if a > 1")
