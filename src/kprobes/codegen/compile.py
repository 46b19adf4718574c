"""Compiler of one site: its probes to LLVM IR, and that to a template of machine code.

Probes of one shape share a template: what differs between them (event ids, counters) is put
in when the template is linked, so a thousand probes cost one compilation.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct

from kprobes.arch.arch import Arch, CallAbi
from kprobes.codegen import filters, override, record, returns, runtime
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Function, Value, const
from kprobes.codegen.object import read_template
from kprobes.model.abi import GuestAbi, Template
from kprobes.model.override import Override
from kprobes.model.plan import Returning, Role
from kprobes.model.resolved import RegisterValue, Resolved, StackTraceValue, within
from kprobes.model.resolved import calls_guest as operand_calls

_READERS = ("copy_kernel", "copy_user", "string_kernel", "string_user")
_WORD = 8

_MODULE = """{intrinsics}
declare void @llvm.trap()
declare i64 @llvm.ctlz.i64(i64, i1)
{runtime}
declare dso_local i64 @clock()
{readers}
declare dso_local i64 @walk_stack(i64, i64, i64, i64)
declare dso_local i64 @walk_user_stack(i64, i64)
{externals}
{functions}
!0 = !{{!"branch_weights", i32 1000, i32 1}}
!1 = !{{!"branch_weights", i32 1, i32 1000}}
!2 = !{{i32 1, !"override-stack-alignment", i32 {alignment}}}
!3 = !{{i64 0, i64 65536}}
!4 = !{{i64 0, i64 4294967296}}
!5 = !{{}}
!llvm.module.flags = !{{!2}}
attributes #0 = {{
  noinline noredzone nounwind "frame-pointer"="none" "no-builtins" "no-jump-tables"="true"
}}
"""


_FUNCTION = """define {kind} i64 @{name}({parameters}) #0 {{
{lines}
}}"""
_RETURN = "ret i64 poison"


class Form(Struct, frozen=True, kw_only=True):
    """What the code of one site is made from; see ``compile_probes``."""

    probes: tuple[Resolved, ...]
    returning: tuple[Returning, ...] = ()
    overrides: tuple[Override, ...] = ()
    is_framed: bool
    is_patched: bool = False

    @property
    def recorded(self) -> list[Resolved]:
        """Its probes by their numbers in the code: those of returns come last."""
        return [*self.probes, *(probe for each in self.returning for probe in each.returns.probes)]

    @property
    def shape(self) -> tuple[object, ...]:
        """What the machine code depends on: equal shapes differ in numbers only."""
        probes, returning, overrides = (
            tuple([each.shape for each in group])
            for group in (self.probes, self.returning, self.overrides)
        )
        return self.is_framed, self.is_patched, probes, returning, overrides


def load_compiler() -> None:
    """Load LLVM, which takes 60 ms once; another thread can do it beforehand."""
    from kprobes import llvm

    llvm.initialize()


def needs_frame(
    arch: Arch, probes: Sequence[Resolved], returning: Sequence[Returning] = ()
) -> bool:
    """Whether something is read there that only the saving entry code can give.

    Args:
        arch: of the guest.
        probes: of the site.
        returning: what return probes do there.
    """
    return not arch.code.call.parameters or bool(saved_reads(arch, probes, returning))


def saved_reads(
    arch: Arch, probes: Sequence[Resolved], returning: Sequence[Returning] = ()
) -> frozenset[str]:
    """Return the registers that are read there, of those that saving entry code keeps.

    Args:
        arch: of the guest.
        probes: of the site.
        returning: what return probes do there.
    """
    call = arch.code.call
    if any(each.role in (Role.RETURN, Role.TRAMPOLINE) for each in returning):
        return frozenset(call.saved)
    operands = [item.operand for probe in probes for item in probe.fetches]
    if not (operands or returning):
        return frozenset()
    operands += [operand for each in returning for operand in each.returns.kept]
    parts = [part for operand in operands for part in within(operand)]
    names = {part.name for part in parts if isinstance(part, RegisterValue)}
    if any(isinstance(part, StackTraceValue) and not part.is_user for part in parts):
        names.update(arch.unwound)
    return frozenset(call.aliases.get(name, name) for name in names) & set(call.saved)


def calls_guest(
    abi: GuestAbi, probes: Sequence[Resolved], returning: Sequence[Returning] = ()
) -> bool:
    """Whether code of the guest's runs there, which may change any of the flags.

    Args:
        abi: the guest's constants.
        probes: of the site.
        returning: what return probes do there.
    """
    recorded = (*probes, *(probe for each in returning for probe in each.returns.probes))
    kept = (operand for each in returning for operand in each.returns.kept)
    is_called = any(probe.calls_guest for probe in recorded) or any(map(operand_calls, kept))
    return is_called or abi.clock is not None


def compile_probes(  # noqa: PLR0913 - all that machine code depends on
    arch: Arch,
    abi: GuestAbi,
    probes: Sequence[Resolved],
    *,
    returning: Sequence[Returning] = (),
    overrides: Sequence[Override] = (),
    is_framed: bool,
    is_patched: bool = False,
) -> Template:
    """Return the code that runs all probes of one site, one after the other.

    Where there are overrides it returns whether the call is skipped, and leaves what that returns
    in the place of the saved register for it.

    Args:
        arch: of the guest.
        abi: its constants and the session's.
        probes: in the order in which they record.
        returning: what return probes of one function do there, after these.
        overrides: what may skip the call after that, the first that wants to; only with a frame.
        is_framed: whether the saving entry code comes before it.
        is_patched: whether the site is not an ftrace site.

    Returns:
        A template with the symbols ``site``; ``event0`` ... per probe, those of ``returning``
        last; ``table0`` ... and ``ip0`` ... of those that count; ``override0`` ..., the address of
        each one's words; ``instances``,
        ``instance_count`` and ``trampoline`` of that function, and
        ``missed_upcall``, its counter of returns that Python is not asked about; the names of
        ``Readers``; and ``clock``.
    """
    form = Form(
        probes=tuple(probes),
        returning=tuple(returning),
        overrides=tuple(overrides),
        is_framed=is_framed,
        is_patched=is_patched,
    )
    return compile_form(arch, abi, form)


def compile_form(arch: Arch, abi: GuestAbi, form: Form) -> Template:
    """Return the code of one site; see ``compile_probes``.

    Args:
        arch: of the guest.
        abi: its constants and the session's.
        form: the probes.
    """
    source = module_text(arch, abi, form)
    from kprobes import llvm

    return read_template(llvm.compile_object(source, arch.code), arch.code)


def module_text(arch: Arch, abi: GuestAbi, form: Form) -> str:
    """Return the LLVM IR for the probes of one site.

    Args:
        arch: of the guest.
        abi: its constants and the session's.
        form: the probes.
    """
    open_context = partial(_context, arch, abi, form)
    context, probes = open_context(), form.probes
    is_alone = len(probes) == 1 and not (form.returning or form.overrides)
    if is_alone and abi.loads is None and filters.quick_steps(probes[0]):
        # A hit that is rejected so early must not save registers for what it does not come to.
        chosen = open_context()
        _emit_choice(chosen, probes[0])
        record.emit_probe(context, probes[0], 0)
        context.out.emit(_RETURN)
        functions = [
            _function(arch, "probe", chosen.out),
            _function(arch, "record", context.out, kind="internal "),
        ]
    else:
        record.emit_probes(context, probes, 0)
        returns.emit(context, form.returning, len(probes))
        is_skipped = override.emit(context, form.overrides)
        context.out.emit(_RETURN if is_skipped is None else f"ret {is_skipped}")
        functions = [_function(arch, "probe", context.out)]
    return _MODULE.format(
        intrinsics=arch.code.intrinsics,
        runtime=runtime.INTRINSICS,
        alignment=arch.code.call.alignment,
        readers="\n".join(f"declare dso_local i64 @{name}(i64, i64, i64)" for name in _READERS),
        externals="\n".join(_externals(form)),
        functions="\n".join((*functions, *_parts(context, functions))),
    )


def _externals(form: Form) -> Iterator[str]:
    # An event's number fits an instruction's operand, a table's size 32 bits. All else that linking
    # gives is an address, of which LLVM may assume nothing but the code model.
    recorded = form.recorded
    words = (f"override{n}" for n, _ in enumerate(form.overrides))
    names = ("site", "trampoline", "instances", "missed_upcall", *words)
    ranges = {**dict.fromkeys(names, ""), "instance_count": ", !absolute_symbol !4"}
    ranges |= {f"event{n}": ", !absolute_symbol !3" for n, _ in enumerate(recorded)}
    counting = [(n, table.number) for n, probe in enumerate(recorded) for table in probe.tables]
    ranges |= {
        name: "" for n, table in counting for name in (f"ip_event{n}", f"table{table}_event{n}")
    }
    for name, range_ in ranges.items():
        yield f"@{name} = external dso_local global i8{range_}"


def _emit_choice(context: Context, probe: Resolved) -> None:
    f, call = context.out, context.code.call
    rejected = f.label("rejected")
    record.emit_choice(context, probe, 0, rejected)
    given = ", ".join(f"i64 %{name}" for name in call.parameters)
    done = f.value("i64", f"musttail call {call.convention} i64 @record({given})")
    f.emit(f"ret {done}")
    f.place(rejected)
    f.emit(_RETURN)


def _function(arch: Arch, name: str, out: Function, *, kind: str = "") -> str:
    call = arch.code.call
    return _FUNCTION.format(
        kind=f"{kind}{call.convention}",
        name=name,
        parameters=", ".join(f"i64 %{name}" for name in call.parameters),
        lines="\n".join(out.lines),
    )


def _parts(context: Context, functions: Sequence[str]) -> Iterator[str]:
    text = "\n".join(functions)
    for name, definitions in context.parts.items():
        yield definitions
        yield runtime.called(name, text).replace("preserve_mostcc", context.code.call.convention)


# The stack when the code of a site is entered, the lowest address on the left. On x86-64 the site's
# own call may lead here, with the arguments in registers; or entry code, which pushes more:
#
#     [return] | the probed code's stack
#     [return] [r15 r14 r13 r12 r11 r10 bp bx ax flags] [site] | the probed code's stack
#      pushed   saved                                    above   its top is registers["sp"]
#
# Where no ftrace site is patched nothing returns to the site: its word is a filler. On arm64 there
# is always entry code, and it does not push a return address, but has one among what it saves. A
# return probe that puts another one into that place changes where the function returns to:
#
#     [x0 ... x30] [pstate] [where to go on, filler] | the probed code's stack
#      saved        link=x30  above
def _context(arch: Arch, abi: GuestAbi, form: Form) -> Context:
    out, call = Function(), arch.code.call
    out.place("entry")
    entered = out.value("ptr", call.stack)
    stack = out.op("add", out.value("i64", f"ptrtoint {entered} to i64"), call.pushed)
    registers = {name: Value("i64", f"%{name}") for name in call.parameters}
    constants = arch.patch.constants if form.is_patched else arch.constants
    registers |= {name: const(value) for name, value in constants.items()}
    link = result = None
    if form.is_framed:
        places = {name: out.op("add", stack, _WORD * n) for n, name in enumerate(call.saved)}
        link = places[call.link] if call.link else None
        result = places[arch.returns.value]
        registers |= _saved(out, call, places)
        stack = out.op("add", stack, _WORD * len(call.saved) + call.above)
    registers["sp"] = stack
    registers[call.pc] = out.op("add", out.address_of("site"), arch.hit_shift)
    # Where the guest's readers copy numbers to that are only looked at.
    scratch = out.value("ptr", "alloca i64, align 8")
    registers["scratch"] = out.value("i64", f"ptrtoint {scratch} to i64")
    pt_regs = None
    if any(fetch.is_stack for probe in form.recorded for fetch in probe.fetches):
        place = out.value("ptr", f"alloca [{len(arch.registers)} x i64], align 8")
        pt_regs = out.value("i64", f"ptrtoint {place} to i64")
    fields = [probe.definition.synthetic_fields for probe in form.recorded]
    # A hit that records at the entry and keeps the time for the return reads the clock once.
    is_timed = any(each.returns.is_timed for each in form.returning)
    return Context(
        out=out,
        abi=abi,
        arch=arch,
        registers=registers,
        stack=stack,
        link=link,
        result=result,
        pt_regs=pt_regs,
        asked_stack=out.variable() if any(e.is_stack_triggered for e in fields) else None,
        stamped=out.variable() if is_timed and form.probes else None,
    )


def _saved(out: Function, call: CallAbi, places: Mapping[str, Value]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, place in places.items():
        # A return address may be put in its place.
        found[name] = out.load(place) if name == call.link else out.load_constant(place)
    for name, expression in call.computed.items():
        found[name] = out.op("or", found[name], out.value("i64", expression))
    return found | {alias: found[name] for alias, name in call.aliases.items()}
