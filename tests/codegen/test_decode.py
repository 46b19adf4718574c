"""Records of generated code as ``ring`` reads them: both have the record from one layout."""

from random import Random
from typing import Any, cast

import numpy as np

from kprobes.model.abi import CPU_SHIFT, SLACK
from kprobes.model.events import Batch
from kprobes.model.resolved import Field, Storage
from kprobes.ring.chunk import Bytes, Shapes
from kprobes.ring.reader import Geometry, RingReader
from tests.build import reference
from tests.build.kernel import make_probe
from tests.build.machine import Machine, random_state
from tests.build.records import One, Value, records
from tests.build.ring import IdentityClock
from tests.codegen.test_fetch import DEFINITIONS


def test_the_decoder_reads_what_the_code_wrote() -> None:
    machine, random = Machine(), Random(7)
    sites = [
        machine.load([make_probe(text, event_id=n, addr=0xFFFF_FFFF_8100_1000 + 16 * n)])
        for n, text in enumerate(DEFINITIONS, 1)
    ]
    reference.fill(machine, random)
    for _ in range(80):
        pointers = {name: reference.address(random) for name in ("di", "si", "dx", "cx", "bx")}
        machine.hit(random.choice(sites), random_state(random, **pointers))
    assert machine.lost(0) == 0
    known = Shapes([probe.layout for site in sites for probe in site.probes])
    ring = machine.ring(0)

    def copy(offset: int, size: int) -> Bytes:
        return np.frombuffer(machine.cpu.read(ring + offset, size), np.uint8)

    reader = RingReader(Geometry(cpu=0, size=machine.abi.ring_size, slack=SLACK), copy)
    head = machine.word(0) & (1 << CPU_SHIFT) - 1

    parts = reader.read(head, known, IdentityClock())

    found = [row for part in parts for batch in part.batches for row in _rows(batch)]
    expected = [(r.counter, r.event_id, r.pid, r.values) for r in records(machine, 0)]
    assert sorted(found) == sorted(expected)
    assert (reader.tail, reader.damaged) == (head, 0)


def _rows(batch: Batch) -> list[tuple[int, int, int, tuple[Value, ...]]]:
    pids = (batch.pid.astype(np.int64) & 0xFFFF_FFFF).tolist()
    columns = [_column(batch, n) for n in range(len(batch.values))]
    return [
        (ts, batch.layout.event_id, pid, tuple(column[n] for column in columns))
        for n, (ts, pid) in enumerate(zip(batch.ts.tolist(), pids, strict=True))
    ]


def _column(batch: Batch, n: int) -> list[Value]:
    field, mask = batch.layout.fields[n], batch.faulted[n]
    values: list[Any] = batch.values[n].tolist()
    if field.storage is Storage.NUMBER and mask is not None:
        pairs = zip(values, mask.tolist(), strict=True)
        values = [None if is_bad else value for value, is_bad in pairs]
    return [_value(field, value) for value in values]


def _value(field: Field, value: Any) -> Value:
    if isinstance(value, list):
        return tuple(_one(field, element) for element in cast("list[One]", value))
    return _one(field, value)


def _one(field: Field, value: One) -> One:
    if isinstance(value, int):
        return value & (1 << 8 * field.size) - 1
    if value is None or field.storage is Storage.TEXT:
        return value
    return value.ljust(16, b"\0") if field.storage is Storage.COMM else value + b"\0"
