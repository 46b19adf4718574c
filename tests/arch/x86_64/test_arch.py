"""A function, understood, after the architecture's value."""

from kprobes.arch.registry import arch
from kprobes.model.kernel import TextPart, TextTables
from kprobes.units import Addr
from tests.build.text import START


def test_a_function_s_instructions_and_verdicts_are_known() -> None:
    part = TextPart(addr=Addr(START), code=bytes.fromhex("4157 488b0510000000 f30f1efa c3"))

    analyse = arch("x86_64").listing.analyse("f", [part], TextTables())

    assert dict(analyse.sizes) == {START: 2, START + 2: 7, START + 9: 4, START + 13: 1}
    assert analyse.insn_verdict(START).verdict == "copy"
    assert analyse.insn_verdict(START + 2).verdict == "relocate"
    assert analyse.insn_verdict(START + 9).is_refused
    assert "inside the 2-byte instruction" in analyse.insn_verdict(START + 1).why


def test_an_address_inside_an_instruction_leads_to_its_start() -> None:
    part = TextPart(addr=Addr(START), code=bytes.fromhex("4157 488b0510000000"))

    analyse = arch("x86_64").listing.analyse("f", [part], TextTables())

    assert [analyse.start_of(START + at) for at in (0, 1, 2, 8)] == [START, START] + 2 * [START + 2]
    assert analyse.start_of(START + 9) is None
