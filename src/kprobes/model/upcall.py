"""What Python does at a site, and a vCPU that waits there for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kprobes.units import Addr


@dataclass(slots=True, kw_only=True)
class Waiting:
    """One vCPU that waits for Python.

    Attributes:
        upcall: number of the upcall that it came to.
        cpu: its number in the guest.
        task: its ``task_struct``.
        page_table: what its register of that has, for the memory of its task's user.
        registers: of the probed code by pt_regs name: r15 ... di, ``flags``, ``sp``, ``ip``. What
            is changed here is what it goes on with. ``ip`` is where it goes on unless changed:
            before the instruction its address, behind it the one that comes next. ``sp`` may go
            up: a lower one is not taken.
    """

    upcall: int
    cpu: int
    task: Addr
    page_table: int
    registers: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcall:
    """What Python does at one site.

    Attributes:
        number: tells it from every other upcall of its session; counts what it missed.
        addr: of the probed instruction; of one at all returns of a function that of its entry.
        is_after: whether it comes behind the instruction, as a post_handler, or before.
        timeout_s: how long a vCPU waits for ``serve`` before it goes on without.
        serve: gets the vCPU, and may change its registers; must not raise.
    """

    number: int
    addr: Addr
    is_after: bool
    timeout_s: float = 1.0
    serve: Callable[[Waiting], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What the code of one site asks Python.

    Attributes:
        gate: where all code asks.
        before: the number to ask by before the instruction, or None.
        after: the number to ask by behind it, or None.
    """

    gate: Addr
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """Code of one site.

    Attributes:
        code: where the patch leads.
        copies: where the code goes on as if at some addresses that the patch may cover, or behind
            which it has still something to do.
    """

    code: bytes
    copies: Mapping[Addr, Addr]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All upcalls that are served at one time: before one instruction, or behind it.

    Attributes:
        number: what the guest asks by; counts what was not answered.
        upcalls: at least one; in the order in which they are served. Another question may have
            them, too: they are the same at all returns of a function.
        copies: as the site's detour has them.
    """

    number: int
    upcalls: tuple[Upcall, ...]
    copies: Mapping[Addr, Addr]

    def serve(self, waiting: Waiting) -> None:
        """Have every upcall served; who goes elsewhere before the instruction is the last.

        As the kernel's aggr_pre_handler(): what a handler has redirected nobody else is shown.
        """
        at = waiting.registers["ip"]
        shown = next((addr for addr, copy in self.copies.items() if copy == at), at)
        waiting.registers["ip"] = shown
        for upcall in self.upcalls:
            waiting.upcall = upcall.number
            upcall.serve(waiting)
            if not upcall.is_after and waiting.registers["ip"] != shown:
                break
        ip = Addr(waiting.registers["ip"])
        waiting.registers["ip"] = self.copies.get(ip, ip)
