"""Predicted costs, by what a hit fetches; and those of sites, by where a hit passes."""

import pytest

from kprobes.model.plan import Plan, Returning, ReturnMethod, Returns, Role, Site, Strategy
from kprobes.plan.cost import CODE, SITE_NS, predicted_ns, predicted_pause_s, site_costs
from kprobes.units import Addr
from tests.build.kernel import make_probe

FTRACE, JUMP, BREAKPOINT = Strategy.FTRACE, Strategy.JUMP, Strategy.BREAKPOINT


@pytest.mark.parametrize("arch", CODE)
def test_each_read_of_memory_and_each_string_takes_its_time(arch: str) -> None:
    cost = CODE[arch]
    plain = predicted_ns(arch, make_probe("p f a=$arg1 b=%ax"), [FTRACE])

    assert plain == cost.record + SITE_NS[FTRACE]
    read = predicted_ns(arch, make_probe("p f a=+8(+0($arg1)) b=+0(%ax)"), [FTRACE])
    assert read == plain + 3 * cost.read
    text = predicted_ns(arch, make_probe("p f a=+0($arg1):string"), [FTRACE])
    assert text == plain + cost.read + cost.string


def test_a_breakpoint_costs_more_than_what_it_does() -> None:
    probe = make_probe("p f")
    found = [predicted_ns("x86_64", probe, [each]) for each in (FTRACE, JUMP, BREAKPOINT)]

    assert found == sorted(found)
    assert found[2] > 1000
    assert predicted_ns("x86_64", probe, [FTRACE, JUMP]) > found[0] + SITE_NS[JUMP]


def test_a_pause_grows_with_the_sites() -> None:
    assert predicted_pause_s(1) < 0.005
    assert predicted_pause_s(34_000) == pytest.approx(0.85, rel=0.1)


def site(addr: int, strategy: Strategy) -> Site:
    return Site(strategy=strategy, addr=Addr(addr), old=b"\x90")


def test_of_a_return_the_entry_and_the_dearest_exit_count() -> None:
    one, two, three = (make_probe("p f", event_id=n) for n in (1, 2, 4))
    returns = Returns(entry=Addr(0x100), return_method=ReturnMethod.RETINSN, probes=(two,))

    def does(role: Role) -> tuple[Returning, ...]:
        return (Returning(role=role, returns=returns),)

    plans = [
        Plan(site=site(0x100, FTRACE), probes=(one,), returning=does(Role.ENTER)),
        Plan(site=site(0x120, JUMP), probes=(), returning=does(Role.RETURN)),
        Plan(site=site(0x140, BREAKPOINT), probes=(three,), returning=does(Role.RETURN)),
        Plan(site=site(0x160, JUMP), probes=(), returning=does(Role.RETURN)),
    ]

    found = site_costs(plans, 6) * 1e9

    assert found.tolist() == pytest.approx(
        [0, SITE_NS[FTRACE], SITE_NS[FTRACE] + SITE_NS[BREAKPOINT], 0, SITE_NS[BREAKPOINT], 0]
    )
