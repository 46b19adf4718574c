"""Two hundred runs beside somebody else's tracing, half of them killed: `make sweep`."""

import logging
import os
import re

import pytest

from tests.system.conftest import Boot
from tests.system.foreign import NO_OTHERS, OTHERS, RUNS, STATE, ours, run

pytestmark = pytest.mark.sweep

_log = logging.getLogger(__name__)
_RUNS = int(os.environ.get("KPROBES_HOST_RUNS", "200"))
_TIMEOUT_S = 3600
_RECORD = """
cd /tmp
trace-cmd record -q -e sched:sched_process_exec -o /tmp/theirs.dat sleep 100000 &
until grep -q sched_process_exec /sys/kernel/tracing/set_event; do sleep 0.1; done
"""


def test_the_state_of_others_survives_hundreds_of_runs(boot_host: Boot) -> None:
    guest = boot_host("bookworm", "trace-cmd")
    run(guest, OTHERS)
    recording = guest.start(_RECORD + "wait")
    run(guest, "until grep -q sched_process_exec /sys/kernel/tracing/set_event; do sleep 1; done")
    before = run(guest, STATE)
    run(guest, f"cat > /tmp/runs.py <<'EOF'\n{RUNS}\nEOF\n")

    ran = run(guest, f"python3 /tmp/runs.py 11 {_RUNS}", _TIMEOUT_S)
    run(guest, "kprobe restore")

    _log.info("%s", ran.strip().splitlines()[-1])
    killed = re.search(r"killed (\d+) of", ran)
    assert killed is not None
    assert int(killed[1]) >= _RUNS // 4
    assert run(guest, STATE) == before
    assert ours(guest) == ""
    run(guest, "killall -INT sleep")
    recording.wait(180)
    assert "sched_process_exec" in run(guest, "trace-cmd report -i /tmp/theirs.dat | tail -n 5")
    run(guest, NO_OTHERS)
