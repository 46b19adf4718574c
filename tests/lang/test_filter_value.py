"""Lists of CPUs as the kernel reads them."""

import pytest

from kprobes.lang.filter_value import read_cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", [0]),
        ("007", [7]),
        ("0,2", [0, 2]),
        ("0 2", [0, 2]),
        (" 1 ,, 3 ", [1, 3]),
        ("1-3", [1, 2, 3]),
        ("0-1,3-4", [0, 1, 3, 4]),
        ("N", [7]),
        ("6-N", [6, 7]),
        ("all", list(range(8))),
        ("ALL:1/4", [0, 4]),
        ("0-7:2/4", [0, 1, 4, 5]),
        ("1-6:1/3", [1, 4]),
        ("0-3:0/2", []),
        ("", []),
        (",", []),
    ],
)
def test_a_list_names_its_cpus(text: str, cpus: list[int]) -> None:
    assert read_cpus(text, count=8) == set(cpus)


@pytest.mark.parametrize(
    "text",
    [
        *("8", "0-8", "3-1", "-1", "1-", "a", "0x1", "1.2", "1;2", "0-3:2", "0-3:/2", "0-3:3/2"),
        *(
            "0:1/2",
            "0-3:1/0",
            "all:",
            "9" * 30,
            "0-3:1/99999999999",
            "1--2",
            "N1",
            "0-" + "9" * 5000,
        ),
    ],
)
def test_what_is_no_list_is_none(text: str) -> None:
    assert read_cpus(text, count=8) is None
