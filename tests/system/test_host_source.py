"""Lines and variables of the source on the kernel that ``kprobe`` itself runs on: a module's."""

import re

import pytest

from tests.build.debug_info import debug_module
from tests.build.module import dummy
from tests.system.conftest import Boot
from tests.system.foreign import run
from tests.system.test_source_modules import LOAD, WORK

pytestmark = pytest.mark.guest

_MODULE = "-q -t host --module /debug/dummy.ko"
_TRACE = (
    f"kprobe trace {_MODULE} 'p:entry dummy_xmit skb len=skb->len' "
    "'p:later dummy:dummy_xmit:4 skb len=skb->len dummies=numdummies count=nr_cpu_ids' "
    f"--exit-status=ignore -- '{WORK}'"
)
_EVENT = re.compile(r": (\w+): \(dummy_xmit\+\S+ \[dummy\]\) (.*)")


def test_a_modules_lines_and_variables_are_probed(boot_host: Boot) -> None:
    files = {"/dummy.ko": dummy("bookworm", "amd64"), "/debug/dummy.ko": debug_module()}
    guest = boot_host("bookworm", files=files)
    run(guest, LOAD)

    shown = _EVENT.findall(run(guest, _TRACE))
    variables = run(guest, f"kprobe vars {_MODULE} dummy:dummy_xmit:4")

    entries = [what for name, what in shown if name == "entry"]
    assert len(entries) >= 2
    assert [what for name, what in shown if name == "later"] == [
        f"{what} dummies=3 count={guest.options.cpus}" for what in entries
    ]
    assert re.search(r"^dummy_xmit\+0x\w+/0x\w+ \[dummy\]$", variables, re.MULTILINE)
    assert re.search(r"^  skb +struct sk_buff \* +%\w+$", variables, re.MULTILINE)
