"""Machine code of return probes: its size in each role, what a call executes, and time to compile.

To be run from two trees, before and after a change of the guest-side runtime:
``PYTHONPATH=src:. python tools/runtime_code.py``. The architectures' code is compiled and run in an
emulated CPU as the tests do it, so all figures but the last are the same wherever it runs.
"""

import sys
import time
from collections.abc import Iterator

from iced_x86 import Decoder

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch
from kprobes.arch.x86_64.arch import X86_64
from kprobes.codegen.compile import compile_probes
from kprobes.codegen.upcall import compile_upcall
from kprobes.model.plan import Returning, ReturnMethod, Returns, Role
from kprobes.model.resolved import RegisterValue
from kprobes.model.upcall import MailboxLayout
from kprobes.units import Addr
from tests.build import arm64, arm64_returning, machine, returning

_TEXT = "r f v=$retval"
_ABIS = {X86_64.name: machine.ABI, AARCH64.name: arm64.ABI}


def main() -> None:
    """Print everything."""
    for arch in (X86_64, AARCH64):
        for name, code in _codes(arch):
            count = len(code) // 4 if arch is AARCH64 else sum(1 for _ in Decoder(64, code))
            _show(f"{arch.name:8} {name:16} {count:4} instructions {len(code):5} bytes")
    for name, count in _executed():
        _show(f"{name:25} {count:4} executed")
    start = time.process_time()
    count = sum(1 for _ in range(5) for arch in (X86_64, AARCH64) for _ in _codes(arch))
    _show(f"{(time.process_time() - start) / count * 1000:.1f} ms of CPU time to compile each")


def _show(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _codes(arch: Arch) -> Iterator[tuple[str, bytes]]:
    for role in Role:
        for keeps in (False, True):
            if role is not Role.ENTER or keeps:
                done = [Returning(role=role, returns=_returns(arch, keeps=keeps))]
                is_patched = role not in (Role.ENTER, Role.HOOK)
                code = compile_probes(
                    arch,
                    _ABIS[arch.name],
                    (),
                    returning=done,
                    is_framed=True,
                    is_patched=is_patched,
                ).code
                yield f"{role.name}{' kept' * keeps}", code
    mailbox = Addr(machine.MAILBOX)
    yield "upcall", compile_upcall(arch, _ABIS[arch.name], mailbox, MailboxLayout(cpus=2)).code


def _returns(arch: Arch, method: str = ReturnMethod.RETHOOK, *, keeps: bool) -> Returns:
    make = returning.return_probe if arch is X86_64 else arm64_returning.return_probe
    site = returning.SITE if arch is X86_64 else arm64.SITE
    return Returns(
        entry=Addr(site),
        return_method=ReturnMethod(method),
        probes=(make(_TEXT, event_id=1, addr=site),),
        kept=(RegisterValue(name=arch.arguments[0]),) if keeps else (),
    )


def _executed() -> Iterator[tuple[str, int]]:
    for method in (ReturnMethod.RETINSN, ReturnMethod.RETHOOK):
        for keeps in (False, True):
            name = f"{method}{' kept' * keeps}"
            yield f"x86_64   {name}", _executed_x86_64(_returns(X86_64, method, keeps=keeps))
            yield f"aarch64  {name}", _executed_aarch64(_returns(AARCH64, method, keeps=keeps))


def _executed_x86_64(returns: Returns) -> int:
    guest, script = machine.Machine(is_watched=True), machine.KERNEL + 0x1000
    guest.cpu.add_exit(returning.CALLERS)
    function = returning.Function(guest, returns)
    function.arm()
    state = machine.random_state(guest.random, bp=script)
    guest.cpu.set_number(state["sp"], returning.CALLERS)
    guest.cpu.set_number(script, function.leave.addr)
    guest.cpu.trace, guest.cpu.actions = [], {}
    returning.run(guest, function.addr, state)
    return len(guest.cpu.trace)


def _executed_aarch64(returns: Returns) -> int:
    guest = arm64.Arm64Machine(is_watched=True)
    guest.sign()
    leaving = arm64_returning.Leaving(arm64_returning.RET)
    function = arm64_returning.Function(guest, returns, leaving)
    function.arm()
    guest.cpu.trace, guest.cpu.actions = [], {}
    function.call()
    return len(guest.cpu.trace)


if __name__ == "__main__":
    main()
