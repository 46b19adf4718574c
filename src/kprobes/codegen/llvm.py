"""Door to LLVM: IR text in, an object file's bytes out.

llvmlite has no types, so its names stay in this file. Importing it takes 80 ms: nothing imports
this module before something is to be compiled.
"""

from functools import cache
from typing import Any

import llvmlite.binding as llvm

from kprobes.arch.arch import CodeInfo

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false


def compile_object(source: str, code: CodeInfo) -> bytes:
    """Return the ELF object that LLVM makes of a module's IR text.

    Args:
        source: the module, without a target triple.
        code: the target's facts.

    Raises:
        RuntimeError: the IR is wrong, which is our own bug.
    """
    module: Any = llvm.parse_assembly(f'target triple = "{code.triple}"\n{source}')
    module.verify()
    machine = _machine(code.triple, code.cpu, code.features, code.model)
    # clang's -O2: constants that only the plan knows are folded, parts of the runtime inlined,
    # loops over saved registers unrolled. The targets have no vector registers.
    options: Any = llvm.create_pipeline_tuning_options(speed_level=2)
    builder: Any = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


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
