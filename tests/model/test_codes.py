import pytest

from kprobes.model.codes import Code, rejection, text_of


def test_a_code_has_the_kernels_text() -> None:
    assert text_of("BAD_REG_NAME") == "Invalid register name"


def test_an_unknown_code_is_our_bug() -> None:
    with pytest.raises(KeyError):
        text_of("NO_SUCH_CODE")


def test_a_rejection_carries_code_text_and_column() -> None:
    error = rejection(Code.BAD_TYPE, command="p f %di:x", column=8, hint="types: u8")

    assert (error.code, error.text) == ("BAD_TYPE", "Unknown type is specified")
    assert (error.command, error.column, error.hint) == ("p f %di:x", 8, "types: u8")
