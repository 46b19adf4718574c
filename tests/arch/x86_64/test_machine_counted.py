"""Members that code adds 1 to: of the forms that compilers write."""

import pytest

from kprobes.arch.x86_64.machine import counted


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("4883835006000001", [0x650]),  # add qword ptr [rbx + 0x650], 1
        ("48ff8350060000", [0x650]),  # inc qword ptr [rbx + 0x650]
        # mov rax, [rbx + 0x650]; xor esi, esi; mov rdi, rbx; add rax, 1; mov [rbx + 0x650], rax
        ("488b8350060000 31f6 4889df 4883c001 48898350060000", [0x650]),
        ("488b8350060000 4883c001 48898358060000", []),  # to another place
        ("488b8350060000 4883c002 48898350060000", []),  # add rax, 2
        ("83835006000001", []),  # add dword ptr [rbx + 0x650], 1
        ("", []),
    ],
)
def test_places_of_what_is_counted_up(code: str, found: list[int]) -> None:
    assert list(counted(bytes.fromhex(code))) == found
