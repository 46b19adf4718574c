"""The benchmarks' programs hit what is probed as often as they say: all figures depend on it."""

import pytest

from bench.__main__ import ISAS
from bench.elf_program import PATH
from bench.guest import attached
from bench.many import POLLED, WRITTEN, polling, writing
from tests.system.conftest import Boot

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_STRING = f"{WRITTEN} path=+0($arg2):ustring size=$arg3"


def test_every_element_of_a_call_is_one_hit(boot: Boot, arch: str) -> None:
    isa = ISAS[arch]
    both = polling(isa, hits=60, repeats=3, cpus=2)
    loops = {"poll": polling(isa), "both": both, "write": writing(isa)}
    hits = [
        ("poll", f"{POLLED} a=$arg1", "a > 0", loops["poll"].total),
        ("poll", f"{POLLED} a=$arg1", "common_pid == 1", 0),
        ("both", f"{POLLED} a=$arg1", "a > 0", 360),
        ("write", _STRING, f'path == "{PATH}" && size == {len(PATH) + 1}', loops["write"].total),
    ]
    machine = boot(files={f"/bench/{name}": loop.program() for name, loop in loops.items()})
    found: list[int] = []

    with attached(machine, loops) as rig:
        for program, where, chosen, _ in hits:
            with rig.ours(f"p:hit {where}", filter=chosen) as driver:
                rig.run(program)
            found.append(sum(driver.counts().recorded.values()))

    assert found == [wanted for *_, wanted in hits]
