"""X-rays in words, in colours and as JSON."""

import re

from kprobes.cli.xray_print import as_colors, as_json, as_lines, as_text
from kprobes.inspect.model import FunctionText
from kprobes.inspect.xray import around, function_at, xray
from kprobes.units import Addr
from tests.build.json_lines import objects
from tests.build.kernel import SITE
from tests.build.our_code import CODE, ours
from tests.build.snapshot import NOP, REST, SLIDE, call, make_snapshot


def site_of(*, slide: int = 0) -> FunctionText:
    snapshot = make_snapshot(slide=slide)
    return xray(snapshot, around(snapshot, Addr(SITE)))


def text_of(function_text: FunctionText, *, has_verdicts: bool = False) -> str:
    return as_text(as_lines(function_text, has_verdicts=has_verdicts))


def test_a_site_is_told_from_where_it_is_to_who_changed_it() -> None:
    assert text_of(site_of(slide=SLIDE)).splitlines() == [
        f"f  {SITE:#x} in memory, {SITE - SLIDE:#x} as linked (KASLR moved it by {SLIDE:#x})",
        "6.1.0-56-cloud-amd64, image vmlinux",
        "- in the image, + in memory",
        "",
        "    # 5 bytes: ftrace site, idle: a nop, which boot made of the call to __fentry__",
        f"=>- {SITE:x}  e8 fb f0 ff ff        call    {SITE - 0xF00:#x} <__fentry__>",
        f"=>+ {SITE:x}  0f 1f 44 00 00        nopl    0x0(%rax,%rax,1)",
        f"    {SITE + 5:x}  41 57                 push    %r15",
        f"    {SITE + 7:x}  41 56                 push    %r14",
        f"    {SITE + 9:x}  41 55                 push    %r13",
        "",
        "probe: ftrace: a call in its ftrace site",
    ]


def test_text_that_is_alike_is_said_to_be() -> None:
    code = NOP + REST
    snapshot = make_snapshot(code, code)

    assert "image and memory hold the same" in text_of(xray(snapshot, around(snapshot, Addr(SITE))))


def test_a_kernel_without_a_file_says_why() -> None:
    snapshot = make_snapshot(was=None)

    assert "no image: no file" in text_of(xray(snapshot, around(snapshot, Addr(SITE))))


def test_verdicts_stand_after_each_instruction() -> None:
    snapshot = make_snapshot()
    function_text = xray(snapshot, function_at(snapshot, Addr(SITE)))

    lines = text_of(function_text, has_verdicts=True).splitlines()

    assert any(line.endswith("push    %r15  [copy]") for line in lines)
    assert any("nopl    0x0(%rax,%rax,1)  [ftrace]" in line for line in lines)
    assert ", 14 bytes" in lines[0] or " bytes" in lines[0]


def test_our_code_is_shown_with_its_notes() -> None:
    snapshot = ours()

    text = text_of(xray(snapshot, around(snapshot, Addr(SITE))))

    assert f"code of our probe first, at {CODE:#x}" in text
    assert re.search(r"mov +%rdi,0x28\(%\w+\)  # first: one, x64, at 0x28", text)
    assert "<code of our probe first>" in text


def test_colours_change_nothing_but_colours() -> None:
    lines = as_lines(site_of(), has_verdicts=True)

    bright = as_colors(lines)

    assert "\x1b[" in bright
    plain = re.sub(r"\x1b\[[0-9;]*m", "", bright)
    assert [line.rstrip() for line in plain.splitlines()] == as_text(lines).splitlines()


def test_json_has_all_of_it() -> None:
    snapshot = ours()
    function_text = xray(snapshot, around(snapshot, Addr(SITE)))

    (found,) = objects("xray", as_json(function_text))

    assert found["site"] == f"{SITE:#x}"
    assert found["probe"]["verdict"] == "ftrace"
    (mark,) = found["marks"]
    assert (mark["author"], mark["probe"], mark["leads_to"]) == ("probe", "first", f"{CODE:#x}")
    assert [row["side"] for row in found["text"]][:3] == ["image", "memory", "both"]
    assert found["text"][1]["bytes"] == call(CODE)
    assert found["detours"][0]["title"] == "code of our probe first"
    assert any("note" in row for row in found["detours"][0]["text"])


def test_json_of_a_file_alone_has_no_sides_and_no_slide() -> None:
    snapshot = make_snapshot(None)

    (found,) = objects("xray", as_json(xray(snapshot, function_at(snapshot, Addr(SITE)))))

    assert (found["slide"], found["site"]) == (None, None)
    assert {row["side"] for row in found["text"]} == {None}
