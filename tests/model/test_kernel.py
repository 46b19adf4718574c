"""Facts of a kernel that follow from others."""

import pytest

from kprobes.model.kernel import CType, TypeKind, value_range
from tests.build.kernel import make_kernel


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.1.0-56-cloud-amd64", (6, 1)),
        ("6.18-rc4", (6, 18)),
        ("7.2.13+deb14", (7, 2)),
        ("x", (0, 0)),
    ],
)
def test_the_version_is_the_releases_first_two_numbers(
    release: str, version: tuple[int, int]
) -> None:
    assert make_kernel([], release=release).version == version


@pytest.mark.parametrize(
    ("type_", "allowed"),
    [
        (CType(kind=TypeKind.INT, number=1, size=4, is_signed=True), range(-(1 << 31), 1 << 31)),
        (CType(kind=TypeKind.INT, number=1, size=8), range(1 << 64)),
        (CType(kind=TypeKind.INT, number=1, size=16), None),
        (CType(kind=TypeKind.INT, number=1, size=1, name="_Bool"), range(2)),
        (CType(kind=TypeKind.ENUM, number=1, size=4), range(-(1 << 31), 1 << 32)),
        (CType(kind=TypeKind.POINTER, number=1, size=8), range(-(1 << 63), 1 << 64)),
        (CType(kind=TypeKind.AGGREGATE, number=1, size=16), None),
        (CType(kind=TypeKind.OTHER, number=1), None),
    ],
)
def test_numbers_of_a_type(type_: CType, allowed: range | None) -> None:
    assert value_range(type_) == allowed
