"""Door to LLVM: IR text in, an object file's bytes or functions of this machine out.

llvmlite has no types, so its names stay in this file. Importing it takes 80 ms: nothing imports
this module before something is to be compiled.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import llvmlite.binding as llvm

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false


class TargetMachine(Protocol):
    """LLVM's names for what code is made for: a CodeInfo."""

    @property
    def triple(self) -> str:
        """The machine's architecture and system."""
        ...

    @property
    def cpu(self) -> str:
        """The CPU."""
        ...

    @property
    def features(self) -> str:
        """What it has, or has not, beyond the CPU's own."""
        ...

    @property
    def model(self) -> str:
        """The code model: how far away an address may be."""
        ...


def compile_object(source: str, code: TargetMachine) -> bytes:
    """Return the ELF object that LLVM makes of a module's IR text.

    Args:
        source: the module, without a target triple.
        code: the target's facts.

    Raises:
        RuntimeError: the IR is wrong, which is our own bug.
    """
    machine = _machine(code.triple, code.cpu, code.features, code.model)
    # Constants that only the plan knows are folded, parts of the runtime inlined, loops over saved
    # registers unrolled. The targets have no vector registers.
    return bytes(machine.emit_object(_optimized(source, code.triple, machine)))


def native_code() -> str:
    """Return what the code depends on that LLVM makes for this machine: CPU, LLVM's own version."""
    words = (llvm.get_process_triple(), *_native_cpu(), ".".join(map(str, llvm.llvm_version_info)))
    return " ".join(words)


def compile_native(source: str) -> bytes:
    """Return the object that LLVM makes of a module's IR text for this machine.

    Args:
        source: the module, without a target triple.

    Raises:
        RuntimeError: the IR is wrong, which is our own bug.
    """
    machine = _native_machine()
    return bytes(machine.emit_object(_optimized(source, llvm.get_process_triple(), machine)))


def load_native(data: bytes) -> Callable[[str], int]:
    """Load what ``compile_native`` has made; return what gives its functions' addresses.

    The code stays for as long as what is returned does.
    """
    engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _native_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    address: Callable[[str], int] = engine.get_function_address
    return address


def _native_cpu() -> tuple[str, str]:
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _native_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = _native_cpu()
    target: Any = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=2, jit=True)


@cache
def initialize() -> None:
    """Register LLVM's targets."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()


@cache
def _machine(triple: str, cpu: str, features: str, model: str) -> Any:
    # static: an address is a number that linking puts into the code, never an entry of a table.
    initialize()
    target: Any = llvm.Target.from_triple(triple)
    return target.create_target_machine(
        cpu=cpu, features=features, opt=2, reloc="static", codemodel=model
    )


def _optimized(source: str, triple: str, machine: Any) -> Any:
    # As clang's -O2.
    module: Any = llvm.parse_assembly(f'target triple = "{triple}"\n{source}')
    module.verify()
    options: Any = llvm.create_pipeline_tuning_options(speed_level=2)
    builder: Any = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module
