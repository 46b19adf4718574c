"""Plans for a guest of the tests: breakpoints and jumps on nops in its text."""

from collections.abc import Sequence

from kprobes.model.plan import Displaced, Plan, Site, Strategy
from kprobes.units import Addr
from tests.build.guest import GuestWithSites
from tests.build.kernel import make_probe

JUMP_SIZE = 5


def patched_plans(made: GuestWithSites, strategy: Strategy, texts: Sequence[str]) -> list[Plan]:
    """Put single-byte nops at places away from the sites, and plan a probe on each."""
    return [_plan(made, strategy, n, text) for n, text in enumerate(texts)]


def _plan(made: GuestWithSites, strategy: Strategy, number: int, text: str) -> Plan:
    addr = Addr(made.sites[-1] + 0x100 + 0x20 * number)
    size = JUMP_SIZE if strategy is Strategy.JUMP else 1
    code = b"\x90" * size
    made.guest.memory.ram.write(made.guest.memory.physical(addr), code)
    displaced = Displaced(addr=addr, code=code, count=size, stop=Addr(addr + size))
    site = Site(strategy=strategy, addr=addr, old=code, displaced=displaced)
    return Plan(site=site, probes=(make_probe(text, event_id=number + 1, addr=addr),))
