"""These tests need elfutils' libdw, which `make test` installs before those with guests."""

import ctypes

import pytest


@pytest.fixture(autouse=True)
def _libdw() -> None:
    try:
        ctypes.CDLL("libdw.so.1")
    except OSError:
        pytest.skip("libdw1 is not installed")
