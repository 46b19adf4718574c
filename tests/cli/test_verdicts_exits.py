"""Ways out of functions as lines."""

from kprobes.cli.verdicts import as_table, exits_as_json, proof, sum_up
from kprobes.guest.text import Classified
from kprobes.model.plan import Exit, ExitKind, Exits, Unproven
from kprobes.units import Addr
from tests.build.json_lines import objects
from tests.build.kernel import TEXT, make_kernel, symbol

F, G, H = (symbol(name, TEXT + i * 0x40, size=0x40) for i, name in enumerate(("f", "g", "hhh")))
KERNEL = make_kernel([F, G, H])
RETURN = Exit(addr=Addr(TEXT + 9), kind=ExitKind.RETURN, target=None, size=5)
TAIL = Exit(addr=Addr(TEXT + 0x50), kind=ExitKind.TAIL, target=F.addr, size=1, why="too short")


def found() -> list[Classified]:
    gap = Unproven(addr=Addr(TEXT + 0x44), why="it is strange")
    exits = (
        Exits(entry=F.addr, exits=(RETURN,)),
        Exits(entry=G.addr, exits=(RETURN, TAIL), why_not=gap),
        Exits(entry=H.addr, refusal="it never returns"),
    )
    pairs = zip((F, G, H), exits, strict=True)
    return [Classified(symbol=s, exits=e, symbols=KERNEL.symbols) for s, e in pairs]


def test_a_function_is_a_line() -> None:
    assert as_table(found(), has_exits=False) == (
        "f    retinsn  1 exit\n"
        "g    rethook  2 exits  g+0x4/0x40: it is strange\n"
        "hhh  refused           it never returns\n"
    )


def test_exits_stand_below_their_function() -> None:
    assert as_table(found()[1:2], has_exits=True) == (
        "g: rethook, as these may not be all: g+0x4/0x40: it is strange\n"
        "    f+0x9/0x40   return                   one jump\n"
        "    g+0x10/0x40  tail jump to f+0x0/0x40  a breakpoint: too short\n"
    )


def test_proof_says_what_it_rests_on() -> None:
    assert proof(found()[0]) == "retinsn, as these are proven to be all"
    assert proof(found()[2]) == "refused: it never returns"


def test_classes_are_summed_up() -> None:
    assert sum_up(found()) == (
        "3 functions: 1 retinsn (33.3%), 0 tail (0.0%), 1 rethook (33.3%), 1 refused (33.3%)"
    )


def test_a_function_is_an_object() -> None:
    first, second, third = objects("exits", exits_as_json(found()))

    assert (first["function"], first["class"], first["reason"]) == ("f", "retinsn", None)
    assert first["exits"][0] == {
        "where": "f+0x9/0x40",
        "address": f"{TEXT + 9:#x}",
        "kind": "return",
        "target": None,
        "size": 5,
        "why": None,
    }
    assert (second["reason"], second["at"]) == ("it is strange", f"{TEXT + 0x44:#x}")
    assert (third["class"], third["reason"], third["exits"]) == ("refused", "it never returns", [])
