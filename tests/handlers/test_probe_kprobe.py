"""Kprobe objects that are registered nowhere."""

from collections.abc import Mapping
from typing import Any

import pytest

from kprobes.errors import UsageError
from kprobes.handlers.probe import Kprobe


def _pre(probe: object, regs: object) -> None: ...
def _post(probe: object, regs: object, flags: int) -> None: ...


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"symbol_name": "vfs_read"}, "vfs_read"),
        ({"symbol_name": "vfs_read", "offset": 16}, "vfs_read+0x10"),
        ({"symbol_name": "ext4:ext4_sync"}, "ext4:ext4_sync"),
        ({"addr": 0xFFFF_FFFF_8100_0000}, "0xffffffff81000000"),
        ({"addr": 0xFFFF_FFFF_8100_0000, "offset": 4}, "0xffffffff81000004"),
    ],
)
def test_a_place_is_spelled_as_in_a_definition(fields: Mapping[str, Any], place: str) -> None:
    probe = Kprobe(pre_handler=_pre, **fields)

    assert probe.place == place
    assert repr(probe) == f"<Kprobe _pre at {place}: 0 hits, 0 missed, 0 errors>"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pre_handler": _pre}, "either a symbol_name or an addr"),
        ({"symbol_name": "f", "addr": 1, "pre_handler": _pre}, "either a symbol_name or an addr"),
        ({"symbol_name": "f"}, "no pre_handler and no post_handler"),
        (
            {"symbol_name": "f", "pre_handler": _post},
            r"pre_handler _post must take \(probe, regs\)",
        ),
        ({"symbol_name": "f", "post_handler": _pre}, r"must take \(probe, regs, flags\)"),
        (
            {"symbol_name": "f", "pre_handler": _pre, "fault_handler": _pre},
            r"fault_handler _pre must take \(probe, regs, fault\)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(fields: Mapping[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Kprobe(**fields)


def test_a_probe_that_is_not_registered_cannot_be_used() -> None:
    probe = Kprobe(symbol_name="vfs_read", post_handler=_post)

    assert (probe.is_registered, probe.nmissed, probe.name) == (False, 0, "_post")
    for use in (probe.enable, probe.disable, probe.unregister, probe.__enter__):
        with pytest.raises(UsageError, match="the Kprobe on vfs_read is not registered"):
            use()
