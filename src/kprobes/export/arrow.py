"""Events as Apache Arrow's columns, and files of them: Parquet, and Arrow's own.

Numbers have the probe's types, times are int64 nanoseconds, texts are dictionaries of valid UTF-8
(``sinks.json.valid_text``), addresses that have a name have a second column ``NAME_sym``, arrays
are lists of fixed size, and what could not be read is null. The schema's metadata have, under
``kprobes``, what the events are as JSON; a field's, under ``kprobes.type``, the kernel's type.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kprobes.export.files import TableFiles
from kprobes.model.events import Batch, Column, Events
from kprobes.model.recording import RecordedKernel
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import Names, TraceSource, flags

# They have no types of their own.
pa: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")
Array = Any
"""A ``pyarrow.Array``."""
_TEXT = pa.dictionary(pa.int32(), pa.utf8())
_ROWS = 1 << 20
"""Of a row group: so many are held until they are written."""


class Columns:
    """Batches to record batches of one kernel's events."""

    def __init__(self, source: TraceSource) -> None:
        self._names = Names(source)
        self._version = source.version

    def batch(self, batch: Batch) -> Any:
        """Return n events as columns by name; numbers are views.

        ``ts``, ``cpu``, ``pid``, ``comm``, ``flags``, ``function``, of a return probe ``caller``
        and ``caller_sym``, then the arguments; one of such a name is there in its place.
        """
        found = dict(self._base(batch))
        fields = zip(batch.layout.fields, batch.values, batch.faulted, strict=True)
        for field, values, faulted in fields:
            found |= self._field(field, values, faulted)
        return pa.RecordBatch.from_arrays(list(found.values()), schema=_schema(batch.layout, found))

    def base(self, batch: Batch) -> Any:
        """Return what all events have, and their name as ``event``."""
        found = {"event": _constant(batch.layout.event, len(batch)), **dict(self._base(batch))}
        for name in ("caller", "caller_sym"):
            found.pop(name, None)
        return pa.RecordBatch.from_arrays(list(found.values()), names=list(found))

    def _base(self, batch: Batch) -> Iterator[tuple[str, Array]]:
        yield "ts", pa.array(np.ascontiguousarray(batch.ts).view(np.int64))
        yield "cpu", pa.array(np.ascontiguousarray(batch.cpu))
        yield "pid", pa.array(np.ascontiguousarray(batch.pid))
        yield "comm", _texts(batch.comm)
        yield "flags", self._flags(batch.context)
        yield "function", _constant(batch.layout.function, len(batch))
        if batch.caller is not None:
            yield "caller", pa.array(np.ascontiguousarray(batch.caller))
            yield "caller_sym", self._symbols(batch.caller, None)

    def _field(self, field: Field, values: Column, faulted: Column | None) -> dict[str, Array]:
        match field.storage:
            case Storage.COMM | Storage.STRING:
                return {field.name: _texts(values) if field.count is None else _lists(values)}
            case Storage.TEXT:
                return {field.name: _constant(valid_text(field.text), len(values))}
            case Storage.NUMBER | Storage.DURATION if field.type == "symstr":
                return {field.name: self._named(values, faulted)}
            case Storage.NUMBER | Storage.DURATION:
                found = {field.name: _numbers(values, faulted)}
                if field.type == "symbol":
                    found[f"{field.name}_sym"] = self._named(values, faulted)
                return found

    def _named(self, values: Column, faulted: Column | None) -> Array:
        if values.ndim == 1:
            return self._symbols(values, faulted)
        flat = self._symbols(values.ravel(), None).cast(pa.utf8())
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1], mask=_mask(faulted))

    def _symbols(self, addrs: Column, faulted: Column | None) -> Array:
        unique, which = np.unique(addrs, return_inverse=True)
        names = [valid_text(self._names.symbol(addr)) for addr in unique.tolist()]
        return _dictionary(which, names, faulted)

    def _flags(self, context: NDArray[np.uint32]) -> Array:
        unique, which = np.unique(context, return_inverse=True)
        return _dictionary(which, [flags(each, self._version) for each in unique.tolist()], None)


def table(rounds: Sequence[Events], source: TraceSource, name: str | None) -> Any:
    """Return the events of one name as a ``pyarrow.Table``, or what all have, oldest first.

    Args:
        rounds: of events.
        source: the kernel that they are of.
        name: of an event, or None.
    """
    columns = Columns(source)
    make = columns.base if name is None else columns.batch
    found: list[Any] = []
    places: list[NDArray[np.intp]] = []
    start = 0
    for events in rounds:
        for index, batch in enumerate(events.batches):
            if name in (None, batch.layout.event):
                at = np.flatnonzero(events.batch == index)
                found.append(make(batch.take(events.row[at])))
                places.append(start + at)
        start += len(events)
    if not found:
        return pa.table({})
    whole = pa.concat_tables(map(_as_table, found)).unify_dictionaries().combine_chunks()
    order = np.argsort(np.concatenate(places), kind="stable")
    return whole if np.all(order[1:] > order[:-1]) else whole.take(pa.array(order))


def _as_table(batch: Any) -> Any:
    return pa.Table.from_batches([batch])


def _schema(layout: RecordLayout, found: dict[str, Array]) -> Any:
    types = {field.name: field.type for field in layout.fields}
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


def _mask(faulted: Column | None) -> Array | None:
    return None if faulted is None or not faulted.any() else pa.array(faulted)


def _numbers(values: Column, faulted: Column | None) -> Array:
    plain = np.ascontiguousarray(values)
    if values.ndim == 1:
        return pa.array(plain, mask=faulted)
    flat = pa.array(plain.ravel())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1], mask=_mask(faulted))


def _texts(values: Column) -> Array:
    found = pa.array(values.tolist(), pa.binary()).dictionary_encode()
    texts: list[bytes] = found.dictionary.to_pylist()
    names = pa.array([valid_text(text) for text in texts], pa.utf8())
    return pa.DictionaryArray.from_arrays(found.indices, names)


def _lists(values: Column) -> Array:
    flat = _texts(values.ravel()).cast(pa.utf8())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _constant(text: str, count: int) -> Array:
    return _dictionary(np.zeros(count, np.int32), [text], None)


def _dictionary(which: Column, names: Iterable[str], faulted: Column | None) -> Array:
    indices = pa.array(which.ravel().astype(np.int32), mask=faulted)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names, pa.utf8()))


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
