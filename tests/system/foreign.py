"""Events of others in a machine's tracefs, and runs of ours beside them, some killed."""

from kprobes.transport.agent import Finished
from kprobes.transport.qemu import Machine

TRACING = "/sys/kernel/tracing"
STATE = f"""
cd {TRACING}
cat kprobe_events uprobe_events set_event trace_options tracing_on trace_clock buffer_size_kb
cat saved_cmdlines_size tracing_cpumask current_tracer set_ftrace_filter set_event_pid
ls instances
for i in instances/*; do [ -d $i ] && cat $i/set_event $i/trace_options $i/buffer_size_kb; done
cat events/others/*/enable events/others/*/filter events/others/*/trigger
cat instances/theirs/events/others/mine/filter instances/theirs/tracing_on
"""
OTHERS = f"""
cd {TRACING}
echo 'p:others/mine vfs_write count=%dx:u64' >> kprobe_events
echo 'r:others/back vfs_read got=$retval:s64' >> kprobe_events
mkdir instances/theirs
echo 'count > 1' > events/others/mine/filter
echo 'count == 7' > instances/theirs/events/others/mine/filter
echo 1 > events/others/mine/enable
echo 1 > instances/theirs/events/others/back/enable
"""
NO_OTHERS = f"""
cd {TRACING}
echo 0 > events/others/mine/enable
rmdir instances/theirs
echo '-:others/mine' >> kprobe_events
echo '-:others/back' >> kprobe_events
"""
RUNS = """
import os, random, signal, sys, time
from kprobes.cli.main import main
import kprobes.cli.tracing, kprobes.cli.trace, kprobes.open, kprobes.host.driver

rng = random.Random(int(sys.argv[1]))
words = ["trace", "-q", "--target", "host", "-o", "/tmp/out.txt",
         "p:a vfs_write count", "--filter", "count > 0",
         "r:b vfs_read $retval", "p:c do_sys_openat2 dfd=$arg1", "--", "ls / >/dev/null"]
longest, killed = 0.0, 0

def run():
    # A process of its own, which has imported everything already.
    child = os.fork()
    if child == 0:
        code = main(words)
        sys.stderr.flush()
        os._exit(code)
    return child

for number in range(int(sys.argv[2])):
    began = time.monotonic()
    child = run()
    if number % 2:
        time.sleep(rng.random() * longest)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    killed += os.WIFSIGNALED(status)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    if not number % 2:
        longest = max(longest, time.monotonic() - began)
print("killed", killed, "of", number + 1, "longest", longest)
"""


def attempt(guest: Machine, command: str, timeout_s: float = 300) -> Finished:
    """Run a command in a guest, whatever comes of it."""
    return guest.run(command, timeout_s)


def text_of(finished: Finished) -> str:
    """Return what a command wrote."""
    return finished.output.decode(errors="backslashreplace")


def run(guest: Machine, command: str, timeout_s: float = 300) -> str:
    """Run a command, which must succeed; return what it wrote."""
    finished = attempt(guest, command, timeout_s)
    assert finished.status == 0, (command[:200], text_of(finished))
    return text_of(finished)


def ours(guest: Machine) -> str:
    """Return what of ours is there: nothing, between runs."""
    look = "cat kprobe_events; ls instances; ls ~/.local/state/kprobes/journal 2>/dev/null"
    return "\n".join(
        line for line in run(guest, f"cd {TRACING}; {look}; true").splitlines() if "kprobes" in line
    )
