"""LLVM IR as text, one typed method per instruction that probes need.

Written down in LLVM's Language Reference. Addresses are plain i64 numbers here; they become
pointers where memory is touched.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from msgspec import Struct


class Value(Struct, frozen=True):
    """A number in IR: its type (``i64``) and how it is written (``%3`` or ``17``)."""

    type: str
    text: str

    def __str__(self) -> str:
        """Return it as an operand with its type."""
        return f"{self.type} {self.text}"


def const(value: int, type_: str = "i64") -> Value:
    """Return a constant; a negative or large number is taken modulo the type's width."""
    bits = int(type_[1:])
    value &= (1 << bits) - 1
    signed = value - (1 << bits) if value >> (bits - 1) and bits > 1 else value
    return Value(type_, str(signed))


_ZERO = const(0)


class Loop(Struct):
    """One round of a loop.

    Attributes:
        index: of the round, from 0.
        carried: what the round before made of the value that is carried along.
        following: what this round makes of it; afterwards, what the last one made.
    """

    index: Value
    carried: Value
    following: Value


class Function:
    """The body of one function while it is written, line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def label(self, hint: str) -> str:
        """Return a fresh label's name."""
        self._count += 1
        return f"{hint}{self._count}"

    def place(self, label: str) -> None:
        """Begin the block of a label."""
        self.lines.append(f"{label}:")

    def emit(self, line: str) -> None:
        """Add an instruction that has no result."""
        self.lines.append(f"  {line}")

    def value(self, type_: str, line: str) -> Value:
        """Add an instruction and return its result."""
        self._count += 1
        name = f"%v{self._count}"
        self.lines.append(f"  {name} = {line}")
        return Value(type_, name)

    def op(self, opcode: str, left: Value, right: Value | int) -> Value:
        """Add a two-operand instruction.

        Args:
            opcode: ``add``, ``and``, ``shl`` ...
            left: operand, which has the result's type.
            right: operand of the same type, or a number.
        """
        other = right if isinstance(right, Value) else const(right, left.type)
        return self.value(left.type, f"{opcode} {left}, {other.text}")

    def compare(self, how: str, left: Value, right: Value | int) -> Value:
        """Add an integer comparison.

        Args:
            how: ``eq``, ``ult``, ``ugt`` ...
            left: operand.
            right: operand of the same type, or a number.
        """
        other = right if isinstance(right, Value) else const(right, left.type)
        return self.value("i1", f"icmp {how} {left}, {other.text}")

    def resize(self, value: Value, type_: str) -> Value:
        """Truncate or zero-extend."""
        have, want = int(value.type[1:]), int(type_[1:])
        if have == want:
            return value
        return self.value(type_, f"{'trunc' if want < have else 'zext'} {value} to {type_}")

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        """Choose a value without a branch.

        Args:
            condition: an i1.
            yes: when it is 1.
            no: when it is 0, of the same type.
        """
        return self.value(yes.type, f"select {condition}, {yes}, {no}")

    def load(self, addr: Value, type_: str = "i64", *, space: int = 0) -> Value:
        """Read memory; always really read, as others change it.

        Args:
            addr: of the memory.
            type_: what it is read as.
            space: LLVM's number of its address space.
        """
        # align 1: addresses are the probed code's, and both architectures read any.
        pointer = self._pointer(addr, space)
        return self.value(type_, f"load volatile {type_}, {pointer}, align 1")

    def load_constant(self, addr: Value) -> Value:
        """Read a u64 that nobody changes while the function runs; not at all if it is not used."""
        return self.value("i64", f"load i64, {self._pointer(addr)}, !invariant.load !5")

    def store(self, addr: Value, value: Value) -> None:
        """Write memory."""
        self.emit(f"store {value}, {self._pointer(addr)}, align 1")

    def put(self, addr: Value, value: Value) -> None:
        """Write memory that others read at any time; always really written, and now."""
        self.emit(f"store volatile {value}, {self._pointer(addr)}, align 1")

    def publish(self, addr: Value, value: Value) -> None:
        """Write memory after everything before: readers elsewhere rely on the order."""
        # An ordinary store on x86-64, stlr on arm64.
        self.emit(f"store atomic {value}, {self._pointer(addr)} release, align 8")

    def exchange(self, addr: Value, expected: Value, new: Value) -> Value:
        """Put a u64 where an expected one is, whatever other CPUs do; return what was there.

        Args:
            addr: of the u64.
            expected: what it must be.
            new: what it is then.
        """
        # A locked instruction on x86-64; on arm64 casal, or exclusives (CodeInfo.features).
        operands = f"{self._pointer(addr)}, {expected}, {new}"
        self._count += 1
        pair = f"%v{self._count}"
        self.lines.append(f"  {pair} = cmpxchg {operands} seq_cst monotonic, align 8")
        return self.value("i64", f"extractvalue {{ i64, i1 }} {pair}, 0")

    def increase(self, addr: Value, number: Value) -> None:
        """Add to the u64 at an address, whatever other CPUs do."""
        self.value("i64", f"atomicrmw add {self._pointer(addr)}, {number} monotonic, align 8")

    def take(self, addr: Value) -> Value:
        """Add one to the u64 at an address, whatever other CPUs do; return what was there."""
        return self.value("i64", f"atomicrmw add {self._pointer(addr)}, i64 1 monotonic, align 8")

    def branch(self, condition: Value, yes: str, no: str, *, is_likely: bool | None = None) -> None:
        """End the block with a two-way jump.

        Args:
            condition: an i1.
            yes: the label when it is 1.
            no: the label when it is 0.
            is_likely: whether it nearly always is 1, or nearly never; None if neither is known.
        """
        # The likely block follows; LLVM moves the other one after the function's return.
        hint = {None: "", True: ", !prof !0", False: ", !prof !1"}[is_likely]
        self.emit(f"br {condition}, label %{yes}, label %{no}{hint}")

    def jump(self, label: str) -> None:
        """End the block with a jump."""
        self.emit(f"br label %{label}")

    def phi(self, arrivals: Mapping[str, Value]) -> Value:
        """Return the value that belongs to the block that was left last, by its label."""
        type_ = next(iter(arrivals.values())).type
        pairs = ", ".join(f"[ {value.text}, %{label} ]" for label, value in arrivals.items())
        return self.value(type_, f"phi {type_} {pairs}")

    @contextmanager
    def loop(self, count: int, carried: Value = _ZERO) -> Generator[Loop]:
        """Repeat what is written inside ``count`` times, at least once."""
        before, head, again, done = (self.label(h) for h in ("before", "head", "again", "done"))
        self.jump(before)
        self.place(before)
        self.jump(head)
        self.place(head)
        at = len(self.lines)
        # Two phis whose second arrivals are known only after the body.
        index, value = self.value("i64", ""), self.value(carried.type, "")
        each = Loop(index, value, value)
        yield each
        self.jump(again)
        self.place(again)
        following = self.op("add", index, 1)
        ends = (const(0), index, following), (carried, value, each.following)
        for line, (first, phi, then) in enumerate(ends, at):
            arrivals = f"[ {first.text}, %{before} ], [ {then.text}, %{again} ]"
            self.lines[line] = f"  {phi.text} = phi {phi.type} {arrivals}"
        self.branch(self.compare("ult", following, count), head, done)
        self.place(done)

    @contextmanager
    def count_up(self, first: Value) -> Generator[Value]:
        """Repeat what is written inside with ``first``, one more, ... until it jumps out."""
        before, head = self.label("before"), self.label("head")
        self.jump(before)
        self.place(before)
        self.jump(head)
        self.place(head)
        at = len(self.lines)
        # A phi whose second arrival is known only after the body.
        number = self.value(first.type, "")
        yield number
        again = self.label("again")
        self.jump(again)
        self.place(again)
        following = self.op("add", number, 1)
        self.jump(head)
        arrivals = f"[ {first.text}, %{before} ], [ {following.text}, %{again} ]"
        self.lines[at] = f"  {number.text} = phi {number.type} {arrivals}"

    def asm(self, text: str, constraints: str, operands: Iterable[Value] = ()) -> None:
        """Add inline assembly without a result.

        Args:
            text: with $0 ... for operands; LLVM, "Inline Assembler Expressions".
            constraints: of the operands, and what it changes.
            operands: what it reads.
        """
        self.emit(f"call void {_asm(text, constraints, operands)}")

    def asm_value(self, text: str, constraints: str, operands: Iterable[Value] = ()) -> Value:
        """Add inline assembly with one i64 result.

        Args:
            text: with $0 for the result, $1 ... for operands.
            constraints: of the result and the operands, and what it changes.
            operands: what it reads.
        """
        return self.value("i64", f"call i64 {_asm(text, constraints, operands)}")

    def settled(self, value: Value) -> Value:
        """Return a value that the compiler can take no further apart: it gets a register."""
        return self.value(value.type, f'call {value.type} asm "", "=r,0"({value})')

    def call(self, symbol: str, operands: Iterable[Value] = (), *, type_: str = "i64") -> Value:
        """Call a C function and return what it returns.

        Args:
            symbol: its name.
            operands: with their types.
            type_: of what it returns.
        """
        return self.value(type_, f"call {type_} @{symbol}({', '.join(map(str, operands))})")

    def run(self, symbol: str, operands: Iterable[Value] = ()) -> None:
        """Call a C function that returns nothing."""
        self.emit(f"call void @{symbol}({', '.join(map(str, operands))})")

    def variable(self) -> Value:
        """Return a u64 of the function's own, 0 at first."""
        # A place on the stack, of which LLVM makes a register: so that what is assigned in one
        # block can be read in another without a phi.
        place = self.value("ptr", "alloca i64, align 8")
        self.assign(place, _ZERO)
        return place

    def assign(self, variable: Value, value: Value) -> None:
        """Give a variable another value."""
        self.emit(f"store {value}, {variable}")

    def read(self, variable: Value) -> Value:
        """Return a variable's value."""
        return self.value("i64", f"load i64, {variable}")

    def pointer(self, addr: Value) -> Value:
        """Return a number as the pointer that the C of the runtime takes."""
        return self.value("ptr", f"inttoptr {addr} to ptr")

    def address_of(self, symbol: str) -> Value:
        """Return the number that linking gives an external symbol."""
        return self.value("i64", f"ptrtoint ptr @{symbol} to i64")

    def _pointer(self, addr: Value, space: int = 0) -> str:
        type_ = f"ptr addrspace({space})" if space else "ptr"
        if not addr.text.startswith("%"):
            return f"{type_} inttoptr ({addr} to {type_})"
        return str(self.value(type_, f"inttoptr {addr} to {type_}"))


def _asm(text: str, constraints: str, operands: Iterable[Value]) -> str:
    return f'asm sideeffect "{text}", "{constraints}"({", ".join(map(str, operands))})'
