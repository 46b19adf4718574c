"""A stub's address to an attached guest: connect, find RAM, find the kernel in it.

Looking at a guest beside the tracer that has its stub: through QEMU's own memory.

A stub serves one client. The tracer's journal says where the guest's RAM is in QEMU's process and
where its page table is; that is enough to read the kernel, and nothing can be written.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.arch import Arch
from kprobes.arch.machine import Machine
from kprobes.arch.registry import arch, machine, machine_of_stub
from kprobes.errors import FormatError, TargetError, UnreachableError
from kprobes.formats.kallsyms import SymbolTable
from kprobes.guest.allocations import nothing
from kprobes.guest.boot import await_boot, read_init_text
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.journal import Entry, Journal, RamMap, at_work, process_start
from kprobes.guest.kernel_abi import thread_size
from kprobes.guest.source_files import KernelFiles, ModulesInMemory, SourceFiles
from kprobes.image.build import SymbolFiles
from kprobes.image.cache import KernelCache, default_root
from kprobes.image.debug_info import own_files, untold
from kprobes.image.file import (
    check_same_build,
    is_of_build,
    kernel_from_image,
    read_image,
    read_symbols,
    symbols_of,
)
from kprobes.image.find import Registers, find_spaces, read_kernel
from kprobes.image.task_members import task_members
from kprobes.model.kernel import Kernel
from kprobes.transport.connect import connect, parse_target
from kprobes.transport.find_ram import RAM_BACKENDS, open_ram
from kprobes.transport.ram import GuestRam, ProcessPlace, ProcessRam, ProcessRun
from kprobes.transport.running import booted_file
from kprobes.transport.stub import Stub
from kprobes.units import Phys


class Access(Struct, frozen=True, kw_only=True):
    """How a guest is looked at.

    Attributes:
        backends: to its RAM, in the order in which they are tried: a ``shared`` file, QEMU's
            ``process``, the ``stub``.
        image: the vmlinux or boot image of its kernel, or None. Another build is refused. It
            gives the types that a kernel built without them lacks.
        symbols: the System.map or vmlinux of a kernel that has no symbols itself, or None.
        modules: files of its modules with their debug information.
        source: the top of its source, which says what the text of its lines is; or None.
        clock: of time stamps, by the kernel's name: local, global, mono, mono_raw, boot, tai, perf,
            x86-tsc; None for that of the kernel's own trace.
        tell: is given words for people when something will take long.
        wait: called often while the guest boots, with why it cannot be looked at yet; what it
            raises ends that. None where one that boots is an error.
    """

    backends: Sequence[str] = RAM_BACKENDS
    image: Path | None = None
    symbols: Path | None = None
    modules: Sequence[Path] = ()
    source: Path | None = None
    clock: str | None = None
    tell: Callable[[str], None] = untold
    wait: Callable[[str], None] | None = None


def attach(target: str, *, access: Access | None = None) -> Guest:
    """Connect to a guest; it runs again afterwards, unless somebody else has stopped it.

    Args:
        target: of its stub or monitor.
        access: how it is looked at.

    Raises:
        UnreachableError: nothing answers, or somebody else uses the stub.
        TargetError: no Linux that we understand runs there, or not the image's.
    """
    _check_free(target)
    stub = connect(target)
    try:
        return identify(stub, access or Access())
    except TargetError as error:
        stub.detach()
        if stub.is_held:
            raise TargetError(f"{error} (the guest is paused; has it booted?)") from error
        raise
    except BaseException:
        stub.detach()
        raise


def _check_free(target: str) -> None:
    # A stub serves one at a time: without a word, the second would wait until it gives up.
    address = parse_target(target)
    other = at_work(lambda each: parse_target(each) == address)
    if other is None:
        return
    first, *others = dict.fromkeys(each.definition for each in other.probes) or ("",)
    what = f" ({first}{f' and {len(others)} more' if others else ''})" if first else ""
    raise UnreachableError(
        f"process {other.pid} is tracing this guest{what}: a gdb stub serves one at a time"
    )


def identify(stub: Stub, access: Access) -> Guest:
    """Find RAM and kernel of a guest that a stub has stopped; it runs again afterwards.

    One that somebody else has stopped stays so; and one that is waited for while it boots stands
    still before its initcalls, until a recording begins or it is let go of.

    Raises:
        TargetError: no Linux that we understand runs there, or not the image's.
    """
    ram = open_ram(stub, backends=access.backends)
    if access.wait is None:
        return _read_guest(stub, ram, access, stub.let_run)
    return await_boot(stub, partial(_read_guest, stub, ram, access, nothing), access.wait)


def _read_guest(stub: Stub, ram: GuestRam, access: Access, let_run: Callable[[], None]) -> Guest:
    machine = machine_of_stub(stub.description.architecture)
    vcpus = registers_of(stub, machine)
    info = _info(stub, arch(machine.name), vcpus)
    # The others may be offline, or not yet woken.
    machine.paging.check(vcpus[0])
    spaces = find_spaces(ram, machine, vcpus)
    # The rest takes 50 ms and looks only at what does not change.
    let_run()
    files = _symbol_files(ram.host, access)
    found = read_kernel(spaces, cache=KernelCache(default_root()), files=files)
    kernel = found.kernel
    if access.image is not None:
        kernel = _with_image(kernel, access.image, access.tell)
    memory = GuestMemory(ram, found.tables)
    if kernel.types is None:
        kernel = _with_types(kernel, ram.host, access.tell)
    info = replace(info, thread_size=thread_size(memory, kernel, info.thread_size))
    if kernel.types is None:
        kernel = _with_members(stub, memory, kernel, info.thread_size)
    init_text = read_init_text(memory, kernel)
    if init_text is not None:
        kernel = replace(kernel, init_text=(init_text.start, init_text.stop))
    return Guest(
        address=stub.address,
        stub=stub,
        memory=memory,
        kernel=kernel,
        init_text=init_text,
        arch=info,
        task_size=machine.paging.task_size(found.tables),
        tables=found.tables,
        host=ram.host,
        open_source=_source_files(kernel, memory, ram.host, access).open,
    )


def _source_files(
    kernel: Kernel, memory: GuestMemory, host: ProcessPlace | None, access: Access
) -> SourceFiles:
    files = KernelFiles(
        named=[path for path in (access.image, access.symbols) if path is not None],
        modules=access.modules,
        booted=None if host is None else booted_file(host.pid),
        tree=access.source,
    )
    return SourceFiles(kernel, ModulesInMemory(memory, kernel.types), files, access.tell)


def registers_of(stub: Stub, machine: Machine) -> list[Registers]:
    """Return every vCPU's registers, those that lead to the kernel's memory among them."""
    found = list[Registers]()
    for cpu in stub.ids():
        # Added to, not copied: it tells which register a stub does not show.
        values = stub.registers(cpu)
        values |= {name: stub.register(cpu, name) for name in machine.paging.registers}
        values |= _rare(stub, cpu, machine.paging.rare)
        found.append(values)
    return found


def _info(stub: Stub, info: Arch, vcpus: Sequence[Registers]) -> Arch:
    known = list[Registers]()
    for cpu, registers in zip(stub.ids(), vcpus, strict=True):
        known.append({**registers, **_rare(stub, cpu, info.code_registers)})
    return replace(info, code=info.code_for(known))


def _rare(stub: Stub, cpu: int, names: Sequence[str]) -> Registers:
    # Those that a CPU has.
    found = dict[str, int]()
    for name in names:
        with suppress(TargetError):
            found[name] = stub.register(cpu, name)
    return found


def _symbol_files(host: ProcessPlace | None, access: Access) -> SymbolFiles:
    named = [path for path in (access.symbols, access.image) if path is not None]

    def tables(release: str, build_id: bytes) -> Iterator[SymbolTable]:
        yield from symbols_of(named)
        if access.symbols is not None:
            read_symbols(access.symbols)
            raise TargetError(
                f"{access.symbols} is not of the guest's kernel, {release}: its functions are "
                "elsewhere"
            )
        yield from symbols_of(_own_files(release, build_id, host, access.tell))

    return tables


def _own_files(
    release: str, build_id: bytes, host: ProcessPlace | None, tell: Callable[[str], None]
) -> Iterator[Path]:
    booted = None if host is None else booted_file(host.pid)
    return own_files(release, build_id, booted, tell)


def _with_image(kernel: Kernel, path: Path, tell: Callable[[str], None]) -> Kernel:
    if kernel.types is not None and is_of_build(path, kernel.build_id):
        # With debug information a file has 600 MB, and nothing more is wanted of it.
        return kernel
    image = read_image(path)
    check_same_build(kernel, image)
    if kernel.types is not None:
        return kernel
    # Its addresses are as linked, its types hold wherever it runs.
    return replace(kernel, types=kernel_from_image(image, tell).types)


def _with_types(kernel: Kernel, host: ProcessPlace | None, tell: Callable[[str], None]) -> Kernel:
    for path in _own_files(kernel.release, kernel.build_id, host, tell):
        with suppress(TargetError, FormatError, OSError):
            found = _with_image(kernel, path, tell)
            if found.types is not None:
                return found
    return kernel


def _with_members(stub: Stub, memory: GuestMemory, kernel: Kernel, thread_size: int) -> Kernel:
    # Who only looks needs none of them; to others it is said what was not found.
    with stub.paused(), suppress(TargetError):
        found = task_members(memory, kernel, machine(kernel.arch), thread_size)
        return replace(kernel, members=found)
    return kernel


def publish_ram_map(guest: Guest, journal: Journal) -> None:
    """Write into a journal how others can look at its guest; nothing where they cannot."""
    host = guest.host
    if host is None:
        return
    runs = tuple((int(run.start), run.size, run.addr) for run in host.runs)
    started = process_start(host.pid)
    info = guest.arch.machine
    journal.point(
        RamMap(
            pid=host.pid,
            started=started,
            runs=runs,
            arch=info.name,
            registers=info.paging.again(guest.tables),
        )
    )


def tracer_at_work(entries: Iterable[Entry]) -> Entry | None:
    """Return the journal of a tracer that has its guest's stub now, or None."""
    alive = (e for e in entries if not e.is_abandoned and e.window is not None)
    return next(alive, None)


@contextmanager
def attach_readonly(
    window: RamMap, symbols: Path | None = None
) -> Generator[tuple[GuestMemory, Kernel]]:
    """Open a guest's memory for reading, and find the kernel in it.

    Raises:
        TargetError: its QEMU has ended, is not ours to look into, or runs no Linux that we know.
    """
    if not window.started or process_start(window.pid) != window.started:
        raise TargetError(f"the guest's QEMU, process {window.pid}, has ended")
    runs = [
        ProcessRun(start=Phys(start), size=size, addr=addr) for start, size, addr in window.runs
    ]
    try:
        ram = ProcessRam(window.pid, runs)
    except (OSError, ValueError) as error:
        raise TargetError(f"QEMU, process {window.pid}, cannot be looked into: {error}") from error
    try:
        spaces = find_spaces(ram, machine(window.arch), [window.registers])
        host = ProcessPlace(pid=window.pid, runs=tuple(runs))
        files = _symbol_files(host, Access(symbols=symbols))
        found = read_kernel(spaces, cache=KernelCache(default_root()), files=files)
        yield GuestMemory(ram, found.tables), found.kernel
    finally:
        ram.close()
