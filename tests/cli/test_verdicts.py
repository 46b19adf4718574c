"""Verdicts as people and programs get them."""

import re
from typing import Any

import pytest

from kprobes.cli.verdicts import as_json, as_text
from kprobes.inspect.check import Checker, Terms, checker_of_guest, cost_of
from kprobes.model.definition import SyntheticFields
from kprobes.model.plan import ReturnMethod
from kprobes.units import Addr
from tests.build.json_lines import objects as valid
from tests.build.named_guest import make_named_guest

Place = tuple[Checker, Addr]
RETURNS = b"\xc3" + b"\xcc" * 26
FAR = b"\xcb" + b"\xcc" * 26
"""A far return: no way out that is understood."""


@pytest.fixture
def place() -> Place:
    made = make_named_guest("vfs_read", "vfs_write", without_site=["lonely"])
    return checker_of_guest(made.guest), made.sites[0]


def text(checker: Checker, *lines: str, source: str = "", has_format: bool = False) -> str:
    found = [(source, result) for result in checker.check("\n".join(lines))]
    return as_text(found, has_format=has_format)


def objects(checker: Checker, *lines: str, has_format: bool = False) -> list[dict[str, Any]]:
    found = [("", result) for result in checker.check("\n".join(lines))]
    return valid("check", as_json(found, has_format=has_format))


def test_an_accepted_definition_is_spelled_out(place: Place) -> None:
    checker, site = place

    said = text(checker, 'p:x  vfs_read a=%di:u8 path=+0(+8(%si)):string t=\\"hi"')

    assert re.sub(r"(?<=\S) {2,}", "  ", said) == (
        'p:x vfs_read a=%di:u8 path=+0(+8(%si)):string t=\\"hi"\n'
        "  accepted\n"
        '  listed as p:kprobes/x vfs_read a=%di:u8 path=+0(+8(%si)):string t=\\"hi"\n'
        f"  by ftrace at vfs_read+0x0/0x20 ({site:#x}): a call in place of the nop 0f1f440000\n"
        "    a:  u8 = %di  at 0x30, 1 byte\n"
        "    path:  string at *(u64 *)(%si + 0x8), read from kernel memory  "
        "at 0x34, 4 bytes and the text\n"
        '    t:  string = "hi"  no bytes of the record\n'
        "  record: 56 bytes and its strings\n"
        "\n"
        "1 definition accepted\n"
    )


def test_a_refused_one_has_its_caret_its_reason_and_what_would_work(place: Place) -> None:
    said = text(place[0], "", "p vfs_read a=%rdi", "p vfs_read+3", source="f.txt")

    lines = said.splitlines()
    assert lines[0] == "f.txt:2: p vfs_read a=%rdi"
    assert lines[1].index("^") == lines[0].index("%rdi")
    assert lines[2:] == [
        "  refused: Invalid register name",
        "  did you mean %di?",
        "",
        "f.txt:3: p vfs_read+3",
        "           ^",
        "  refused: Probe point is not an instruction boundary",
        "  vfs_read+0x3 is inside the 5-byte instruction at vfs_read+0x0",
        "",
        "2 of 2 definitions refused",
    ]


def test_a_pattern_names_its_functions(place: Place) -> None:
    found = text(place[0], "p vfs_* %di")

    assert "accepted for 2 functions, as for the first one\n" in found
    assert found.count("  by ftrace at vfs_") == 2


def test_a_deletion_shows_what_goes(place: Place) -> None:
    assert "\n-:x\n  takes away p:kprobes/x vfs_read\n" in text(place[0], "p:x vfs_read", "-:x")


def test_the_event_s_format_comes_on_demand(place: Place) -> None:
    assert "field:u8 a;" not in text(place[0], "p:x vfs_read a=%di:u8")
    assert "\n    \tfield:u8 a;" in text(place[0], "p:y vfs_read a=%di:u8", has_format=True)


def test_programs_get_one_object_per_statement(place: Place) -> None:
    checker, site = place

    accepted, refused, unplaced, deleted = objects(
        checker, "p:x vfs_read a=%flags:b2@9/64", "p vfs_read a=%rdi", "p nosuch_*", "-:x"
    )

    assert accepted == {
        "definition": "p:x vfs_read a=%flags:b2@9/64",
        "file": None,
        "line": 1,
        "verdict": "accepted",
        "listing": "p:kprobes/x vfs_read a=%flags:b2@9/64",
        "group": "kprobes",
        "event": "x",
        "places": [
            {
                "function": "vfs_read",
                "where": "vfs_read+0x0/0x20",
                "address": f"{site:#x}",
                "strategy": "ftrace",
                "holds": "0f1f440000",
                "displaced": None,
                "why": None,
            }
        ],
        "record": {"size": 48, "has_strings": False, "caller": None},
        "fields": [
            {
                "name": "a",
                "type": "u64",
                "count": None,
                "fetch": "u64 = %flags, bits 9 to 10 of it",
                "can_fault": False,
                "offset": 40,
                "size": 8,
                "bits": [9, 2],
            }
        ],
    }
    assert {"verdict": "refused", "code": "BAD_REG_NAME", "column": 13}.items() <= refused.items()
    assert (refused["reason"], refused["advice"]) == ("Invalid register name", "did you mean %di?")
    assert unplaced["code"] is None
    assert "no function that can be probed" in unplaced["reason"]
    assert deleted["deletes"] == ["p:kprobes/x vfs_read a=%flags:b2@9/64"]


def test_a_text_s_place_in_the_record_is_none(place: Place) -> None:
    (found,) = objects(place[0], "p:x vfs_read $comm", has_format=True)

    assert (found["fields"][0]["offset"], found["fields"][0]["size"]) == (None, 0)
    assert found["format"].startswith("name: x\n")


def leaving(code: bytes, **terms: Any) -> Checker:
    """A checker of a guest where ``vfs_read`` has this code after its ftrace site."""
    made = make_named_guest("vfs_read", "vfs_write")
    made.guest.memory.write(made.sites[0] + 5, code)
    return checker_of_guest(made.guest, Terms(**terms))


def test_a_return_probe_tells_its_way_and_exits_and_its_caller_s_place() -> None:
    said = text(leaving(RETURNS), "r:x vfs_read got=$retval")

    assert re.sub(r"(?<=\S) {2,}", "  ", said) == (
        "r:x vfs_read got=$retval\n"
        "  accepted\n"
        "  listed as r:kprobes/x vfs_read got=$retval\n"
        "  by retinsn at the returns of vfs_read\n"
        "  its exits: retinsn, as these are proven to be all\n"
        "    vfs_read+0x5/0x20  return  one jump\n"
        "    got:  x64 = the returned value  at 0x30, 8 bytes\n"
        "  record: 56 bytes, the caller at 0x28\n"
        "\n"
        "1 definition accepted\n"
    )


def test_what_the_entry_keeps_for_the_return_is_told_with_its_site() -> None:
    checker = leaving(RETURNS, synthetic_fields=SyntheticFields(duration=True, exits=True))

    said = text(checker, "r:x vfs_read a=$arg1")

    assert "  at its entry keeps %di, the time: by ftrace at vfs_read+0x0/0x20 (" in said
    assert re.search(r"duration: +ns since the entry +at 0x38, 8 bytes\n", said)
    assert re.search(r"exit: +symbol = the instruction by which it is left +at 0x40", said)


def test_a_way_that_is_forced_is_told_or_refused() -> None:
    said = text(leaving(RETURNS, return_method=ReturnMethod.RETHOOK), "r:x vfs_read")
    refused = text(leaving(FAR, return_method=ReturnMethod.RETINSN), "r:x vfs_read")

    assert "  by rethook at the returns of vfs_read\n" in said
    assert "  at its entry takes the return over: by ftrace at vfs_read+0x0/0x20 (" in said
    assert "  refused: vfs_read: not by retinsn: " in refused
    assert "  its exits: " in refused


def test_programs_get_the_returns_of_a_place() -> None:
    (found,) = objects(leaving(RETURNS), "r:x vfs_read a=$arg1")
    (alone,) = objects(leaving(RETURNS), "r:x vfs_read")

    (at,) = found["places"]
    assert (at["returns"]["way"], at["returns"]["keeps"]) == ("retinsn", ["%di"])
    assert [exit_["kind"] for exit_ in at["returns"]["exits"]] == ["return"]
    assert (at["strategy"], alone["places"][0]["strategy"]) == ("ftrace", None)
    assert found["record"] == {"size": 56, "has_strings": False, "caller": 40}
    assert "returns" not in objects(leaving(RETURNS), "p:x vfs_read")[0]["places"][0]


def test_who_waits_for_a_module_says_so(place: Place) -> None:
    (found,) = objects(place[0], "p nosuch:thing")

    assert (found["verdict"], found["waits_for"]) == ("accepted", "nosuch")
    assert "waits until module nosuch is loaded" in text(place[0], "p nosuch:other")


def test_what_probes_take_is_predicted_where_it_is_asked_for(place: Place) -> None:
    checker, _ = place
    found = [
        ("", each)
        for each in checker.check("p:one vfs_read a=%di\np nosuch\np:two vfs_read b=+8(+0(%di))")
    ]

    plain, costs = as_text(found, has_format=False), as_text(found, has_format=False, arch="x86_64")

    assert "predicted" not in plain
    lines = costs.splitlines()
    assert [line for line in lines if "predicted" in line] == [
        "  predicted: 60 ns a hit; the guest paused for 2 ms to patch 1 site",
        "  predicted: 230 ns a hit; the guest paused for 2 ms to patch 1 site",
    ]
    assert lines[-1].endswith("armed at once: the guest paused for 2 ms to patch 2 sites")
    one, refused, two = valid("check", as_json(found, has_format=False, arch="x86_64"))
    assert one["cost"] == {"hit_ns": 60, "sites": 1, "pause_s": pytest.approx(0.002025)}
    assert (two["cost"]["hit_ns"], "cost" in refused) == (230, False)


def test_a_return_s_hit_is_left_by_one_exit_and_every_exit_is_patched() -> None:
    checker = leaving(bytes.fromhex("85ff7405c39090909090c3").ljust(27, b"\xcc"))
    (result,) = checker.check("r:back vfs_read a=$arg1")
    cost = cost_of(result, "x86_64")

    assert cost is not None
    exits = result.placed[0].exits
    assert exits is not None
    assert cost.sites == 1 + len(exits.exits.exits) == 3
    assert cost.hit_ns == 50 + 60 + 10 + 1230
