"""An empty disk image that a guest's state can be saved into (QEMU, docs/interop/qcow2.txt)."""

import struct
from pathlib import Path

_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS
_SIZE = 16 << 20
_MAPPED_BY_L1 = _CLUSTER * (_CLUSTER // 8)


def write_qcow2(path: Path) -> None:
    """Write one: its header, a table of reference counts, a block of them, an L1 table."""
    refcount_table, refcounts, l1 = (n * _CLUSTER for n in (1, 2, 3))
    entries = -(-_SIZE // _MAPPED_BY_L1)
    head = (b"QFI\xfb", 2, 0, 0, _CLUSTER_BITS, _SIZE, 0, entries, l1, refcount_table, 1, 0, 0)
    data = bytearray(4 * _CLUSTER)
    struct.pack_into(">4sIQIIQIIQQIIQ", data, 0, *head)
    struct.pack_into(">Q", data, refcount_table, refcounts)
    struct.pack_into(">4H", data, refcounts, 1, 1, 1, 1)
    path.write_bytes(data)
