"""The fields that an event offers to its filter."""

from kprobes.model.definition import SyntheticFields
from kprobes.model.filter import FieldKind, FilterField, Header
from kprobes.resolve.resolve import filter_fields
from tests.build.kernel import make_extra, make_probe


def test_arguments_are_what_they_are_in_the_record() -> None:
    fields = filter_fields(
        make_probe('p f a=$arg1:s16 b=+0($arg1):x8[3] s=+0($arg1):ustring t=\\"hi" y=$arg1:symstr')
    )

    assert list(fields)[:5] == ["a", "b", "s", "t", "y"]
    assert [fields[name] for name in "abst"] == [
        FilterField(kind=FieldKind.NUMBER, source=0, size=2, is_signed=True),
        FilterField(kind=FieldKind.NUMBER, source=1, size=3),
        FilterField(kind=FieldKind.TEXT, source=2),
        FilterField(kind=FieldKind.TEXT, source=3, text=b"hi"),
    ]
    assert fields["y"].kind is FieldKind.SYMBOL_NAME


def test_every_event_has_the_kernel_s_own() -> None:
    fields = filter_fields(make_probe("p f"))

    assert {name: field.source for name, field in fields.items()} == {
        "__probe_ip": Header.IP,
        **dict.fromkeys(("CPU", "cpu", "common_cpu"), Header.CPU),
        **dict.fromkeys(("COMM", "comm"), Header.COMM),
        **dict.fromkeys(("stacktrace", "STACKTRACE"), Header.IP),
        "common_type": Header.TYPE,
        "common_flags": Header.FLAGS,
        "common_preempt_count": Header.PREEMPT_COUNT,
        "common_pid": Header.PID,
    }


def test_an_event_of_a_guest_has_its_process_too() -> None:
    fields = filter_fields(make_probe("p f"), of_guest=True)

    assert fields["tgid"].source is Header.TGID
    assert "tgid" not in filter_fields(make_probe("p f"))


def test_an_argument_comes_before_a_field_of_its_name() -> None:
    fields = filter_fields(make_probe("p f comm=$arg1:u8 cpu=$comm tgid=$arg2"), of_guest=True)

    assert (fields["comm"].source, fields["tgid"].source) == (0, 2)
    assert fields["cpu"] == fields["COMM"]


def test_at_a_return_there_are_the_function_and_the_extra_fields() -> None:
    fields = filter_fields(make_extra("r f", SyntheticFields(duration=True, exits=True)))

    assert fields["duration"].kind is FieldKind.TIME
    assert fields["exit"] == FilterField(kind=FieldKind.NUMBER, source=1, size=8)
    assert fields["__probe_func"].source is Header.IP
    assert "__probe_ip" not in fields
