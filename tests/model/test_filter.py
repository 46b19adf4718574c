"""Filters put together."""

from kprobes.model.filter import (
    ACCEPT,
    REJECT,
    Always,
    Compare,
    Filter,
    Header,
    Relation,
    Step,
    any_of,
    every,
)

YES, NO = Always(holds=True), Always(holds=False)


def _pid(value: int) -> Compare:
    return Compare(source=Header.PID, size=4, is_signed=True, relation=Relation.EQ, value=value)


def test_one_of_several_is_asked_after_the_other() -> None:
    found = any_of([NO, YES, NO])

    assert found.steps == (
        Step(test=NO, yes=ACCEPT, no=1),
        Step(test=YES, yes=ACCEPT, no=2),
        Step(test=NO, yes=ACCEPT, no=REJECT),
    )


def test_all_of_several_go_on_where_the_first_accepts() -> None:
    found = every([any_of([NO, YES]), any_of([YES])])

    assert found is not None
    assert [(step.yes, step.no) for step in found.steps] == [
        (2, 1),
        (2, REJECT),
        (ACCEPT, REJECT),
    ]


def test_none_of_none_is_no_filter() -> None:
    assert every([]) is None


def test_its_sources_are_what_it_tests() -> None:
    found = every([any_of([_pid(1), _pid(2)]), any_of([YES])])

    assert found is not None
    assert found.sources == {Header.PID}


def test_steps_are_certain_while_all_others_reject() -> None:
    chain = Filter(
        steps=(
            Step(test=YES, yes=1, no=REJECT),
            Step(test=NO, yes=REJECT, no=2),
            Step(test=YES, yes=ACCEPT, no=3),
            Step(test=YES, yes=ACCEPT, no=REJECT),
        )
    )

    assert chain.certain == 3
    assert Filter(steps=(Step(test=YES, yes=ACCEPT, no=REJECT),)).certain == 1
