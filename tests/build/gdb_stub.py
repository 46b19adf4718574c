"""A gdb stub on standard input and output, with registers that gdb sets and memory by a formula.

gdb runs it: ``target remote | python -m tests.build.gdb_stub REGISTERS``, the number of those of 8
bytes that come first in its ``g`` packet; others there are none.
"""

import sys
from typing import BinaryIO

_ANSWERS = {
    b"qSupported": b"PacketSize=4000",
    b"?": b"T05thread:01;",
    b"qC": b"QC1",
    b"qAttached": b"1",
    b"qfThreadInfo": b"m1",
    b"qsThreadInfo": b"l",
}


def memory(addr: int, size: int) -> bytes:
    """Return what is in memory: every address has some byte."""
    return bytes(at * 0x9E3779B97F4A7C15 >> 40 & 0xFF for at in range(addr, addr + size))


def next_packet(stream: BinaryIO) -> bytes | None:
    """Return the next packet's payload, or None at the end."""
    while (char := stream.read(1)) not in (b"$", b""):
        pass
    payload = b""
    while char and (char := stream.read(1)) not in (b"#", b""):
        payload += char
    stream.read(2)
    return payload if char else None


def answer(registers: bytearray, packet: bytes) -> bytes:
    """Return the answer to a packet."""
    match packet[:1]:
        case b"g":
            return registers.hex().encode()
        case b"P":
            number, value = packet[1:].split(b"=")
            at = 8 * int(number, 16)
            registers[at : at + 8] = bytes.fromhex(value.decode())
            return b"OK"
        case b"m":
            addr, size = (int(each, 16) for each in packet[1:].split(b","))
            return memory(addr, size).hex().encode()
        case b"H" | b"D":
            return b"OK"
        case _:
            return _ANSWERS.get(packet.partition(b":")[0], b"")


def main() -> None:
    """Serve gdb until it hangs up."""
    registers = bytearray(8 * int(sys.argv[1]))
    while (packet := next_packet(sys.stdin.buffer)) is not None:
        text = answer(registers, packet)
        sys.stdout.buffer.write(b"+$%s#%02x" % (text, sum(text) & 0xFF))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
