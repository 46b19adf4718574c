"""A trace.dat of kprobe events, version 6, for ``trace-cmd report`` to read.

The format is written down in trace-cmd.dat.v6(5). All pages but their times are the same.
"""

import struct

import numpy as np

_PAGE = 4096
_STEP_NS = 100
_EVENT_ID = 1500
_IP = 0xFFFFFFFF81300000

_HEADER_PAGE = """\
\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;
\tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;
\tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;
\tfield: char data;\toffset:16;\tsize:4080;\tsigned:1;
"""
_HEADER_EVENT = """\
# compressed entry header
\ttype_len    :    5 bits
\ttime_delta  :   27 bits
\tarray       :   32 bits

\tpadding     : type == 29
\ttime_extend : type == 30
\ttime_stamp : type == 31
\tdata max type_len  == 28
"""
_FORMAT = f"""\
name: read
ID: {_EVENT_ID}
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned long __probe_ip;\toffset:8;\tsize:8;\tsigned:0;
\tfield:u64 file;\toffset:16;\tsize:8;\tsigned:0;
\tfield:u64 count;\toffset:24;\tsize:8;\tsigned:0;

print fmt: "(%lx) file=0x%Lx count=%Lu", REC->__probe_ip, REC->file, REC->count
"""


def write_trace_dat(events: int) -> bytes:
    """Return a file of at least ``events`` events of one CPU, whole pages of them."""
    head = b"\x17\x08\x44tracing6\0" + b"\0\x08" + struct.pack("<I", _PAGE)
    head += b"header_page\0" + _sized(_HEADER_PAGE, "<Q")
    head += b"header_event\0" + _sized(_HEADER_EVENT, "<Q")
    head += struct.pack("<I", 0)  # no formats of ftrace's own
    head += struct.pack("<I", 1) + b"kprobes\0" + struct.pack("<I", 1) + _sized(_FORMAT, "<Q")
    head += _sized(f"{_IP:x} T vfs_read\n{_IP + 0x310:x} T vfs_write\n", "<I")
    head += _sized("", "<I")  # no printk formats
    head += _sized("1000 bash\n", "<Q")
    head += struct.pack("<I", 1) + b"flyrecord\0"
    pages = _pages(events)
    start = -(-(len(head) + 16) // _PAGE) * _PAGE
    head += struct.pack("<QQ", start, len(pages))
    return head.ljust(start, b"\0") + pages


def _sized(text: str, form: str) -> bytes:
    return struct.pack(form, len(text)) + text.encode()


def _pages(events: int) -> bytes:
    payload = struct.pack("<HBBiQQQ", _EVENT_ID, 0, 0, 1000, _IP, 0xFFFF888003A45C00, 832)
    event = struct.pack("<I", _STEP_NS << 5 | len(payload) // 4) + payload
    each = (_PAGE - 16) // len(event)
    data = event * each
    page = struct.pack("<QQ", 0, len(data)) + data.ljust(_PAGE - 16, b"\0")
    count = -(-events // each)
    pages = np.tile(np.frombuffer(page, np.uint8), count).reshape(count, _PAGE)
    times = np.arange(count, dtype="<u8") * np.uint64(each * _STEP_NS) + np.uint64(10**9)
    pages[:, :8] = times.view(np.uint8).reshape(count, 8)
    return pages.tobytes()
