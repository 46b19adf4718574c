"""``kprobe vars``: how they are shown; on guests in ``tests/system/test_source.py``."""

from kprobes.cli.vars import as_json, as_text, where
from kprobes.inspect.source import PlaceVariables
from kprobes.model.definition import Operation
from kprobes.model.source import Location, LocationKind, Piece, Variable
from tests.build.json_lines import objects


def variable(name: str, kind: LocationKind, number: int = 0, register: str = "") -> Variable:
    location = Location(kind=kind, register=register, number=number)
    return Variable(name=name, type="int", location=location)


_PLACES = [
    PlaceVariables(
        place="vfs_read+0x8/0x40",
        variables=(
            variable("count", LocationKind.REGISTER, register="dx"),
            variable("flags", LocationKind.MEMORY, -8, "sp"),
            variable("limit", LocationKind.STATIC, 0x7000),
            variable("mask", LocationKind.CONSTANT, 32),
            Variable(name="ret", type="ssize_t", location=None, why="it is optimised out"),
        ),
    )
]


def test_each_is_where_the_kernels_language_has_it() -> None:
    assert as_text(_PLACES).splitlines() == [
        "vfs_read+0x8/0x40",
        "  count  int      %dx",
        "  flags  int      -0x8(%sp)",
        "  limit  int      @0x7000",
        "  mask   int      \\32",
        "  ret    ssize_t  - (it is optimised out)",
    ]


def test_what_is_computed_is_shown_as_c_has_it() -> None:
    register = Location(kind=LocationKind.REGISTER, register="sp")
    offset = Location(kind=LocationKind.CONSTANT, number=-4)
    made = Location(
        kind=LocationKind.COMPUTED, operation=Operation.SUB, operands=(register, offset)
    )
    through = Location(kind=LocationKind.MEMORY, number=16, operands=(made,))
    locations = {
        "(%sp - \\-4)": made,
        "+0x10((%sp - \\-4))": through,
        "this_cpu_read(@0x7000)": Location(kind=LocationKind.PER_CPU, number=0x7000),
        "0x7000": Location(kind=LocationKind.ADDRESS, number=0x7000),
    }

    for text, location in locations.items():
        assert where(Variable(name="it", type="int", location=location)) == text


def test_what_is_in_several_places_is_shown_part_by_part() -> None:
    register = Location(kind=LocationKind.REGISTER, register="bp")
    constant = Location(kind=LocationKind.CONSTANT, number=3)
    pieces = (
        Piece(offset=0, size=8, location=register),
        Piece(offset=8, size=4, location=constant),
    )
    variable = Variable(name="f", type="struct fd", location=None, why="apart", pieces=pieces)

    assert where(variable) == "+0 %bp, +8 \\3"
    (shown,) = objects("vars", as_json([PlaceVariables(place="f+0x0/0x4", variables=(variable,))]))
    assert (shown["where"], shown["why"]) == ("+0 %bp, +8 \\3", "apart")


def test_json_has_an_object_for_each() -> None:
    count, *_, ret = objects("vars", as_json(_PLACES))

    assert count == {
        "place": "vfs_read+0x8/0x40",
        "name": "count",
        "type": "int",
        "where": "%dx",
        "why": None,
    }
    assert (ret["where"], ret["why"]) == (None, "it is optimised out")
