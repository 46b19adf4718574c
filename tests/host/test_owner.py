"""Names in tracefs that are ours."""

import os

import pytest

from kprobes.host.owner import Owner, new_owner, owner_of


def test_a_sessions_names_lead_back_to_it() -> None:
    owner = new_owner()

    assert owner_of(owner.label) == owner_of(owner.group) == owner
    assert owner.pid == os.getpid()
    assert new_owner() != owner


@pytest.mark.parametrize(
    "name", ["kprobes", "kprobes-1", "kprobes_a_b_c", "kprobes-1-2-3-4", "my-kprobes-1-2-3", ""]
)
def test_names_of_others_are_not_ours(name: str) -> None:
    assert owner_of(name) is None


def test_a_process_that_is_there_is_not_gone_unless_another_has_its_number() -> None:
    owner = new_owner()

    assert not owner.is_gone
    assert Owner(pid=owner.pid, started="1", session=1).is_gone
    assert Owner(pid=1 << 22, started="1", session=1).is_gone


def test_a_group_is_a_name_that_the_kernel_takes() -> None:
    assert new_owner().group.replace("_", "").isalnum()
    assert len(Owner(pid=4194304, started="9" * 20, session=10**6).group) < 64
