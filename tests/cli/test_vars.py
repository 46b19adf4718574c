"""``kprobe vars``: how they are shown; on guests in ``tests/system/test_source.py``."""

from kprobes.cli.vars import as_json, as_text
from kprobes.inspect.source import PlaceVariables
from kprobes.model.source import Location, LocationKind, Variable
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
        "  limit  int      @0x7000 as linked",
        "  mask   int      \\32",
        "  ret    ssize_t  - (it is optimised out)",
    ]


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
