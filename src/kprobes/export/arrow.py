"""Events as Apache Arrow's columns, and files of them: Parquet, and Arrow's own.

Numbers have the probe's types, times are int64 nanoseconds, texts are dictionaries of valid UTF-8
(``sinks.json.valid_text``), addresses that have a name have a second column ``NAME_sym``, arrays
are lists of fixed size, and what could not be read is null. The schema's metadata have, under
``kprobes``, what the events are as JSON; a field's, under ``kprobes.type``, the kernel's type.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import UsageError
from kprobes.export.files import TableFiles
from kprobes.model.columns import Mask, Selection, base_name, whole
from kprobes.model.events import Batch, Column, addresses
from kprobes.model.recording import RecordedKernel
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.model.strings import Strings
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import Names, TraceSource, flags

# They have no types of their own.
pa: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")
Array = Any
"""A ``pyarrow.Array``."""
_TEXT = pa.dictionary(pa.int32(), pa.utf8())
_ROWS = 1 << 17
"""Of a row group: so many are held until they are written."""


class Columns:
    """Events of one kernel to Arrow's columns."""

    def __init__(self, source: TraceSource, *, is_raw: bool = False) -> None:
        """Have texts valid, or if they are raw as the guest had them: binary."""
        self._names = Names(source)
        self._version = source.version
        self._is_raw = is_raw

    def batch(self, batch: Batch) -> Any:
        """Return n events of one layout as a record batch, with the columns of ``table``."""
        chosen = whole(batch)
        found = self.all(chosen)
        return pa.RecordBatch.from_arrays(list(found.values()), schema=_schema(chosen, found))

    def all(self, chosen: Selection) -> dict[str, Array]:
        """Return events of one name as columns.

        ``ts``, ``cpu``, ``pid``, ``comm``, ``flags``, ``function``, of a return probe ``caller``
        and ``caller_sym``, then the fields. Where one has such a name, that is ``common_pid``.
        """
        found = self.base(chosen)
        if any(kind.caller is not None for kind in chosen.kinds):
            callers, bad = chosen.base("caller")
            found |= {"caller": _numbers(callers, bad), "caller_sym": self._symbols(callers, bad)}
        found = {base_name(name, chosen.fields): column for name, column in found.items()}
        for field in chosen.fields.values():
            found |= self._field(field, chosen)
        return found

    def base(self, chosen: Selection) -> dict[str, Array]:
        """Return what events of all names have."""
        numbers = {name: chosen.base(name)[0] for name in ("ts", "cpu", "pid")}
        return {
            "ts": pa.array(numbers["ts"].view(np.int64)),
            "cpu": pa.array(numbers["cpu"]),
            "pid": pa.array(numbers["pid"]),
            "comm": self._texts(chosen.base("comm")[0]),
            "flags": _labels(chosen.base("context")[0], None, self._flags),
            "function": _coded(*chosen.codes(lambda layout: layout.function)),
        }

    def _field(self, field: Field, chosen: Selection) -> dict[str, Array]:
        if field.storage is Storage.TEXT and not self._is_raw and len(chosen.kinds) == 1:
            # One text, and no object for each event.
            return {field.name: _coded(np.zeros(len(chosen), np.int32), [valid_text(field.text)])}
        strings = chosen.strings(field.name)
        if strings is not None:
            is_stack = field.storage is Storage.STACK
            return {field.name: self._stacks(strings) if is_stack else self._strings(strings)}
        values, bad = chosen.field(field.name)
        try:
            if field.storage not in (Storage.NUMBER, Storage.DURATION):
                return {field.name: self._texts(values)}
            if field.type == "symstr":
                return {field.name: self._symbols(values, bad)}
            found = {field.name: _numbers(values, bad)}
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise UsageError(f"{field.name} has no one type in all functions: {error}") from error
        if field.type == "symbol":
            # Another field may be called so.
            found[base_name(f"{field.name}_sym", chosen.fields)] = self._symbols(values, bad)
        return found

    def _symbols(self, addrs: Column, bad: Mask | None) -> Array:
        if addrs.ndim == 1:
            return _labels(addrs, bad, lambda addr: valid_text(self._names.symbol(addr)))
        return _lists(self._symbols(addrs.ravel(), None).cast(pa.utf8()), addrs.shape[1], bad)

    def _stacks(self, values: Strings) -> Array:
        stacks = [stack or b"" for stack in values.coded.table]
        if self._is_raw:
            each = pa.array(list(map(addresses, stacks)), pa.list_(pa.uint64()))
        else:
            named = [list(map(valid_text, self._names.stack(stack))) for stack in stacks]
            each = pa.array(named, pa.list_(pa.utf8()))
        return each.take(pa.array(values.coded.codes))

    def _strings(self, values: Strings) -> Array:
        codes, table = values.coded
        if self._is_raw:
            found = pa.array(table, pa.large_binary()).take(pa.array(codes))
        else:
            texts = [None if text is None else valid_text(text) for text in table]
            found = _dictionary(pa.array(codes), texts)
        if len(values.shape) == 1:
            return found
        return _lists(found if self._is_raw else found.cast(pa.utf8()), values.shape[1], None)

    def _flags(self, context: int) -> str:
        return flags(context, self._version)

    def _texts(self, values: Column) -> Array:
        if values.ndim > 1:
            flat = self._texts(values.ravel())
            return _lists(flat if self._is_raw else flat.cast(pa.utf8()), values.shape[1], None)
        found = _bytes(values)
        if self._is_raw:
            return found.dictionary_decode()
        texts: list[bytes] = found.dictionary.to_pylist()
        return _dictionary(found.indices, list(map(valid_text, texts)))


def table(
    chosen: Selection, source: TraceSource, *, is_named: bool = True, is_raw: bool = False
) -> Any:
    """Return events as a ``pyarrow.Table``, in their order.

    Args:
        chosen: of one name, or any.
        source: the kernel that they are of.
        is_named: whether they are of one name, and have their fields; else there is what all have,
            and the name as ``event``.
        is_raw: whether texts of the guest are binary.

    Raises:
        UsageError: functions of one name have a field in types that no column can have.
    """
    columns = Columns(source, is_raw=is_raw)
    if not chosen.kinds:
        return pa.table({})
    if is_named:
        found = columns.all(chosen)
        return pa.table(list(found.values()), schema=_schema(chosen, found))
    names = _coded(*chosen.codes(lambda layout: layout.event))
    return pa.table({"event": names, **columns.base(chosen)})


def _schema(chosen: Selection, found: dict[str, Array]) -> Any:
    types = {name: field.type for name, field in chosen.fields.items()}
    return pa.schema(
        [
            pa.field(
                name,
                array.type,
                metadata={"kprobes.type": types[name]} if name in types else None,
            )
            for name, array in found.items()
        ]
    )


def _numbers(values: Column, bad: Mask | None) -> Array:
    if values.ndim == 1:
        return pa.array(values, mask=bad)
    return _lists(pa.array(values.ravel()), values.shape[1], bad)


def _lists(flat: Array, size: int, bad: Mask | None) -> Array:
    mask = None if bad is None else pa.array(bad)
    return pa.FixedSizeListArray.from_arrays(flat, size, mask=mask)


def _bytes(values: Column) -> Array:
    # A dictionary of bytes, of objects or of a fixed size that is filled up with NUL.
    if values.dtype.kind == "O":
        return pa.array(values, pa.large_binary()).dictionary_encode()
    plain = np.ascontiguousarray(values)
    filled = pa.Array.from_buffers(
        pa.binary(plain.itemsize), len(plain), [None, pa.py_buffer(plain)]
    ).dictionary_encode()
    texts = [text.rstrip(b"\0") for text in filled.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(filled.indices, pa.array(texts, pa.large_binary()))


def _labels(numbers: Column, bad: Mask | None, label: Callable[[int], str]) -> Array:
    found = pa.array(numbers, mask=bad).dictionary_encode()
    return _dictionary(found.indices, [label(each) for each in found.dictionary.to_pylist()])


def _coded(codes: NDArray[np.int32], names: Sequence[str]) -> Array:
    return _dictionary(pa.array(codes), names)


def _dictionary(indices: Array, names: Sequence[str | None]) -> Array:
    # Categories are there once, or pandas refuses them; None is no category.
    known = (name for name in dict.fromkeys(names) if name is not None)
    place = {name: number for number, name in enumerate(known)}
    if len(place) < len(names):
        numbers = [None if name is None else place[name] for name in names]
        indices = pa.array(numbers, pa.int32()).take(indices)
    return pa.DictionaryArray.from_arrays(indices, pa.array([*place], pa.utf8()))


def _metadata(layout: RecordLayout, kernel: RecordedKernel, source: TraceSource) -> dict[str, str]:
    about = {
        "version": 1,
        "event": layout.event,
        "group": layout.group,
        "definition": layout.definition,
        "release": kernel.release,
        "arch": kernel.arch,
        "build_id": kernel.build_id.hex(),
        "target": kernel.target,
        "is_ns": source.has_ns,
        "began_ns": kernel.real_ns,
    }
    return {"kprobes": json.dumps(about)}


def _shape(layout: RecordLayout) -> tuple[object, ...]:
    kinds = ((f.name, f.type, f.storage, f.size, f.count) for f in layout.fields)
    return layout.caller_offset is None, *kinds


Opened = tuple[Any, Any]
"""What writes a file, and the schema that its tables must have."""


def _parquet(path: Path, schema: Any) -> Opened:
    return parquet.ParquetWriter(path, schema, compression="zstd"), schema


def _ipc(path: Path, schema: Any) -> Opened:
    # Dictionaries could not grow in it.
    fields = [each.with_type(pa.utf8()) if each.type == _TEXT else each for each in schema]
    plain = pa.schema(fields, metadata=schema.metadata)
    return pa.ipc.new_file(path, plain, options=pa.ipc.IpcWriteOptions(compression="zstd")), plain


class ParquetFiles(TableFiles["ArrowTable"]):
    """One file of each event, compressed by zstd."""

    def __init__(self, path: Path, kernel: RecordedKernel, source: TraceSource) -> None:
        """Begin; OSError where nothing can be written."""
        make = partial(ArrowTable, kernel=kernel, source=source, open_file=_parquet)
        super().__init__(path, _shape, make)


class ArrowFiles(TableFiles["ArrowTable"]):
    """One file of each event in Arrow's format, compressed by zstd; texts are no dictionaries."""

    def __init__(self, path: Path, kernel: RecordedKernel, source: TraceSource) -> None:
        """Begin; OSError where nothing can be written."""
        make = partial(ArrowTable, kernel=kernel, source=source, open_file=_ipc)
        super().__init__(path, _shape, make)


class ArrowTable:
    """One file: rows of one event are held until there are enough to be written."""

    def __init__(
        self,
        path: Path,
        layout: RecordLayout,
        *,
        kernel: RecordedKernel,
        source: TraceSource,
        open_file: Callable[[Path, Any], Opened],
    ) -> None:
        """Write nothing yet.

        Args:
            path: of the file.
            layout: of the event.
            kernel: that it is of.
            source: likewise.
            open_file: opens it for tables of a schema.
        """
        self._metadata = _metadata(layout, kernel, source)
        self._open = partial(open_file, path)
        self._columns = Columns(source)
        self._opened: Opened | None = None
        self._held: list[Any] = []
        self._rows = 0

    def write(self, batch: Batch) -> None:
        """Append rows, oldest first."""
        self._held.append(self._columns.batch(batch))
        self._rows += len(batch)
        if self._rows >= _ROWS:
            self._flush()

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        if self._opened is not None:
            self._opened[0].close()

    def _flush(self) -> None:
        if not self._held:
            return
        whole = pa.Table.from_batches(self._held).unify_dictionaries().combine_chunks()
        whole = whole.replace_schema_metadata(self._metadata)
        if self._opened is None:
            self._opened = self._open(whole.schema)
        writer, schema = self._opened
        writer.write_table(whole.cast(schema))
        self._held, self._rows = [], 0
