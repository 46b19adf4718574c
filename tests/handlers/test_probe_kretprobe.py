"""Kretprobe objects that are registered nowhere."""

from collections.abc import Mapping
from typing import Any

import pytest

from kprobes.errors import UsageError
from kprobes.handlers.probe import Kretprobe


def _handler(instance: object, regs: object) -> None: ...
def _one(instance: object) -> None: ...


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"handler": _handler}, "a Kretprobe has either a symbol_name or an addr"),
        ({"symbol_name": "f", "entry_handler": _handler}, "the Kretprobe on f has no handler"),
        ({"symbol_name": "f", "handler": _one}, r"handler _one must take \(instance, regs\)"),
        (
            {"symbol_name": "f", "handler": _handler, "entry_handler": _one},
            r"entry_handler _one must take \(instance, regs\)",
        ),
        ({"symbol_name": "f", "handler": _handler, "maxactive": 4097}, "maxactive of 4097"),
        ({"symbol_name": "f", "handler": _handler, "maxactive": -1}, "maxactive of -1"),
        ({"symbol_name": "f", "handler": _handler, "data_size": 4097}, "data_size of 4097 bytes"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(fields: Mapping[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Kretprobe(**fields)


def test_calls_are_kept_only_for_who_wants_something_of_them() -> None:
    def keeps(**fields: Any) -> bool:
        return Kretprobe(symbol_name="f", handler=_handler, **fields).keeps

    assert [keeps(), keeps(maxactive=5)] == [False, False]
    assert [keeps(data_size=1), keeps(entry_handler=_handler)] == [True, True]


def test_it_is_shown_with_its_handler() -> None:
    probe = Kretprobe(symbol_name="vfs_read", handler=_handler)

    assert repr(probe) == "<Kretprobe _handler at vfs_read: 0 hits, 0 missed, 0 errors>"
    with pytest.raises(UsageError, match="the Kretprobe on vfs_read is not registered"):
        probe.disable()
