"""This machine, as far as probing its kernel needs to know it."""

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from msgspec import Struct

from kprobes.arch.arch import Arch
from kprobes.arch.registry import arch
from kprobes.errors import TracefsError
from kprobes.formats.elf import build_id
from kprobes.guest.source_files import KernelFiles, SourceFiles
from kprobes.image.debug_info import untold
from kprobes.image.file import check_own_build
from kprobes.image.host import HostFiles, host_kernel
from kprobes.image.symbols import ModuleSymbols
from kprobes.model.kernel import Kernel
from kprobes.model.source import OpenSource, no_source
from kprobes.transport.agent import Child, Command, Finished, start
from kprobes.transport.tracefs import Tracefs, has_kernels_pids, open_tracefs

_BTF = Path("/sys/kernel/btf")
_MODULES = Path("/sys/module")
_FILTERABLE = "available_filter_functions"


class HostMachine(Struct, kw_only=True, eq=False, dict=True):
    """This machine's kernel and its tracing files.

    Attributes:
        kernel: that runs here.
        arch: its architecture.
        tracefs: its tracing files.
        cpus: how many it may have.
        online: how many it has now.
        has_kernels_pids: whether we number its processes as it does: we may be in a container.
        open_source: as ``model.source.OpenSource``.
    """

    kernel: Kernel
    arch: Arch
    tracefs: Tracefs
    cpus: int
    online: int
    has_kernels_pids: bool = True
    open_source: OpenSource = no_source

    @cached_property
    def traceable(self) -> frozenset[str]:
        """Names of the functions that its function tracer knows; none where it does not tell.

        The kernel takes probe events in these only.
        """
        return _read_traceable(self.tracefs)

    def run(self, command: Command, timeout_s: float | None = None) -> Finished:
        """Run a command here, to its end.

        Raises:
            UsageError: there is no such program.
            TargetError: it did not end in time; it is killed then.
        """
        child = start(command)
        try:
            return child.wait(timeout_s)
        except BaseException:
            child.kill()
            raise

    def start(self, command: Command, *, is_held: bool = False) -> Child:
        """Start a command here, as a child of this process, or raise UsageError."""
        return start(command, is_held=is_held)


class SysfsModules:
    """What /sys/module tells of them; implements ``guest.source_files.LoadedModules``."""

    def build_ids(self, module: ModuleSymbols) -> frozenset[bytes]:
        """Return a module's build id; none where it has none."""
        found = build_id(_bytes(_MODULES / module.name / "notes" / ".note.gnu.build-id"))
        return frozenset([found] if found else [])

    def sections(self, module: ModuleSymbols) -> Mapping[str, int]:
        """Return where a module's sections begin that it still has; none where that is hidden."""
        paths = (_MODULES / module.name / "sections").glob("*")
        # Which it still has when it has begun, module_init_section() tells.
        found = {path.name: _bytes(path) for path in paths if not path.name.startswith(".init")}
        return {name: int(text, 16) for name, text in found.items() if text.strip(b"0x\n")}


def open_machine(
    files: KernelFiles | None = None, tell: Callable[[str], None] = untold
) -> HostMachine:
    """Read what this machine's kernel is.

    Args:
        files: that may have its debug information.
        tell: is given words for people when something will take long.

    Raises:
        TracefsError: it has no tracing system, or we may not use it.
        TargetError: its symbols are hidden, or we do not know its architecture; or a file that is
            named is of another kernel.
    """
    tracefs = open_tracefs()
    kernel, files = read_kernel(), files or KernelFiles()
    for path in files.named:
        check_own_build(kernel, path)
    sources = SourceFiles(kernel, SysfsModules(), files, tell, is_slide_known=False)
    return HostMachine(
        kernel=kernel,
        arch=arch(kernel.arch),
        tracefs=tracefs,
        cpus=_possible_cpus(),
        online=os.cpu_count() or 1,
        has_kernels_pids=has_kernels_pids(),
        open_source=sources.open,
    )


def read_kernel() -> Kernel:
    """Return the kernel that runs here, as it is now.

    Raises:
        TargetError: its symbols are hidden.
    """
    name = os.uname()
    modules = sorted(path for path in _BTF.glob("*") if path.name != "vmlinux")
    return host_kernel(
        HostFiles(
            release=name.release,
            machine=name.machine,
            banner=Path("/proc/version").read_text().strip(),
            kallsyms=Path("/proc/kallsyms").read_bytes(),
            notes=_bytes(Path("/sys/kernel/notes")),
            btf=_bytes(_BTF / "vmlinux"),
            module_btf={path.name: _bytes(path) for path in modules},
        )
    )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        # A kernel without types, or a module that has just gone.
        return b""


def _possible_cpus() -> int:
    # cpu/possible: "0-3"; what the rings are made for.
    try:
        text = Path("/sys/devices/system/cpu/possible").read_text().strip()
    except OSError:
        return os.cpu_count() or 1
    return int(text.replace(",", "-").split("-")[-1]) + 1


def _read_traceable(tracefs: Tracefs) -> frozenset[str]:
    try:
        text = tracefs.read(_FILTERABLE)
    except TracefsError:
        return frozenset()
    return frozenset(line.split("\t")[0].split(" ")[0] for line in text.splitlines())
