"""A reader of newc archives, written from the kernel's description of the format."""

from msgspec import Struct


class Found(Struct, frozen=True):
    ino: int
    mode: int
    owner: tuple[int, int]
    links: int
    mtime: int
    device: tuple[int, int]
    data: bytes


def read(data: bytes) -> dict[str, Found]:
    """Return what the kernel would unpack; a later entry of the same name wins."""
    found: dict[str, Found] = {}
    at = 0
    while at < len(data):
        assert at % 4 == 0
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        ino, mode, uid, gid, links, mtime, size, _, _, major, minor, name_size, check = fields
        assert check == 0
        name = data[at + 110 : at + 110 + name_size]
        assert name.endswith(b"\0")
        start = (at + 110 + name_size + 3) & ~3
        body = data[start : start + size]
        assert len(body) == size
        at = (start + size + 3) & ~3
        if name != b"TRAILER!!!\0":
            entry = Found(ino, mode, (uid, gid), links, mtime, (major, minor), body)
            found[name[:-1].decode(errors="surrogateescape")] = entry
    assert at == len(data)
    return found
