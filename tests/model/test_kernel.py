"""Facts of a kernel that follow from others."""

import pytest

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
