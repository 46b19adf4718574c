"""The first signal asks, the second one forces."""

import os
import signal
import subprocess
import sys
import time

import pytest

from kprobes.cli.terminal import Stop

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_kept_signal_is_told_and_raised_where_it_is_safe(number: signal.Signals) -> None:
    with Stop() as stop:
        stop.defer()
        stop.check()
        os.kill(os.getpid(), number)

        assert stop.is_asked
        with pytest.raises(KeyboardInterrupt):
            stop.check()


def test_a_signal_is_not_kept_for_ever_where_others_could_keep_us() -> None:
    with Stop() as stop:
        stop.defer(at_most_s=0.05)
        os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)


def test_a_signal_is_kept_again_when_nobody_can() -> None:
    with Stop() as stop:
        stop.defer(at_most_s=0.05)
        os.kill(os.getpid(), signal.SIGINT)
        stop.defer()

        time.sleep(0.1)

        assert stop.is_asked


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_at_once_while_nothing_has_to_be_finished(number: signal.Signals) -> None:
    with Stop(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]

    with Stop():
        assert [signal.getsignal(number) for number in SIGNALS] != before

    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)

            assert not stop.is_asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal\n"
        "from kprobes.cli.terminal import Stop\n"
        "with Stop() as stop:\n"
        "    stop.defer()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('finishing', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('never')\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert (done.returncode, done.stdout) == (130, b"finishing\n")
    assert b"ended at once" in done.stderr
    assert b"Traceback" not in done.stderr
