"""A ``virsh`` that hands commands of the human monitor on to a QEMU's own monitor."""

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import sys
from kprobes.transport.monitor import Monitor
command, option, domain, kind, end, text = sys.argv[1:]
assert (command, option, kind, end) == ("qemu-monitor-command", "--domain", "--hmp", "--")
if domain != "{domain}":
    sys.exit(f"error: failed to get domain '{{domain}}'")
with open("{log}", "a") as log:
    log.write(text + "\\n")
with Monitor.open("{monitor}") as monitor:
    sys.stdout.write(monitor.command(text).replace("\\n", "\\r\\n"))
"""


class FakeVirsh:
    """The program, in a directory of its own.

    Attributes:
        directory: to be searched for programs.
    """

    def __init__(self, directory: Path, domain: str, monitor: Path) -> None:
        """Make it, for one domain whose monitor is a socket."""
        self.directory = directory
        self._log = directory / "virsh.log"
        directory.mkdir()
        text = _PROGRAM.format(python=sys.executable, domain=domain, monitor=monitor, log=self._log)
        (directory / "virsh").write_text(text)
        (directory / "virsh").chmod(0o755)

    @property
    def commands(self) -> list[str]:
        """What the monitor was told."""
        return self._log.read_text().splitlines()
