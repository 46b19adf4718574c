"""An attached guest: everything that the engine needs to know and touch of it."""

from dataclasses import dataclass

from kprobes.arch.facts import Arch
from kprobes.drivers.guest.memory import GuestMemory
from kprobes.model.kernel import Kernel
from kprobes.ports import Tables
from kprobes.transport.ram import ProcessPlace
from kprobes.transport.stub import Stub


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guest:
    """One guest under a stub.

    Attributes:
        address: of the stub, as a user would give it again.
        stub: connected.
        memory: kernel memory by virtual address.
        kernel: what runs there.
        arch: its architecture.
        task_size: addresses below are user space's, with this guest's paging.
        tables: its kernel's page tables.
        host: where its RAM is in QEMU's memory, or None where that is not known.
    """

    address: str
    stub: Stub
    memory: GuestMemory
    kernel: Kernel
    arch: Arch
    task_size: int
    tables: Tables
    host: ProcessPlace | None = None
