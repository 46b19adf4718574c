"""Operands: what computing them takes."""

import pytest

from kprobes.model.resolved import StackValue, calls_guest


@pytest.mark.parametrize(("slot", "is_guarded"), [(0, False), (1, True)])
def test_only_the_first_stack_slot_is_there_for_certain(slot: int, is_guarded: bool) -> None:
    assert calls_guest(StackValue(slot=slot)) is is_guarded
