"""Our client on a stub that a test programs."""

from collections.abc import Generator
from contextlib import contextmanager

from kprobes.transport.stub import Stub
from tests.build.stub import FakeStub, listening


@contextmanager
def opened(fake: FakeStub, timeout_s: float = 5.0) -> Generator[Stub]:
    """Connect, and detach in the end."""
    with listening(fake) as path, Stub.open(path, timeout_s=timeout_s) as stub:
        yield stub


@contextmanager
def abandoned(fake: FakeStub, timeout_s: float = 5.0) -> Generator[Stub]:
    """Connect, and only close in the end: for stubs that are gone by then."""
    with listening(fake) as path:
        stub = Stub.open(path, timeout_s=timeout_s)
        try:
            yield stub
        finally:
            stub.close()
