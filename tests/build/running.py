"""Functions of every path of a kernel that a load makes run, found by probing their entries."""

import time
from collections.abc import Sequence

from kprobes.drivers.places import places_of
from kprobes.session import Session
from tests.build import hot
from tests.build.sweep import Nothing

NET_FILES = {
    "/net.sh": rb"""
cd /tmp
ifconfig lo 127.0.0.1 up
dd if=/dev/urandom of=net bs=4k count=20 2> /dev/null
want=$(md5sum < net)
mkfifo hold
exec 9<>hold
n=0
while :; do
    nc -l -p 5000 <&9 > got &
    until nc 127.0.0.1 5000 < net 2> /dev/null; do usleep 10000; done
    wait
    [ "$(md5sum < got)" = "$want" ] || echo bad >> wrong
    ping -c 1 127.0.0.1 > /dev/null || echo bad >> wrong
    echo $((n += 1)) > netnew
    mv netnew netrounds
    usleep $1
done
"""
}
"""What loads the network, beside LOAD_FILES."""

PATTERNS = (
    *("vfs_*", "ksys_*", "do_*", "path_*", "lookup_*", "generic_*", "security_*", "pipe_*"),
    *("schedule*", "*_fair", "enqueue_*", "dequeue_*", "update_*", "ttwu_*", "wake_*", "sched_*"),
    *("tick_*", "hrtimer_*", "ktime_*", "timer*", "run_timer*", "rcu_*", "irq_*", "__hrtimer*"),
    *("page_*", "folio_*", "alloc_*", "free_*", "filemap_*", "mas_*", "vma_*", "kmem_*", "lru_*"),
    *("unmap_*", "zap_*", "__alloc_*", "copy_*", "mm_*", "mmap_*", "handle_*", "shmem_*"),
    *("tcp_*", "ip_*", "inet_*", "sk_*", "sock_*", "skb_*", "__skb_*", "__tcp_*", "__ip_*"),
    *(
        "netif_*",
        "dev_*",
        "net_*",
        "napi_*",
        "process_backlog",
        "loopback_*",
        "icmp_*",
        "release_*",
    ),
)
_PER_PATTERN = 150


def found_running(session: Session, count: int, *, for_s: float = 2.0) -> list[str]:
    """Return the names of some functions that ran within a while, the well-known ones first."""
    symbols = session.kernel.symbols
    names = list(dict.fromkeys([*hot.ALL, *matching(session)]))
    has_site = places_of(session.driver.guest).has_site
    probed = [
        name
        for name in names
        if len({s.addr for s in symbols.all_named(name)}) == 1 and has_site(symbols.named(name))
    ]
    session.driver.strategy = None
    session.definitions = []
    session.probe("\n".join(f"p:r{n} {name}" for n, name in enumerate(probed)))
    until = time.monotonic() + for_s + len(probed) / 1000
    counts = session.stream(Nothing(), is_done=lambda: time.monotonic() > until)
    ran = [name for n, name in enumerate(probed, 1) if counts.recorded.get(n, 0)]
    return _spread(ran, count)


def matching(session: Session) -> list[str]:
    """Return the names of functions that PATTERNS name, some of each."""
    symbols = session.kernel.symbols
    found: list[str] = []
    for pattern in PATTERNS:
        names = sorted({s.name for s in symbols.glob(pattern) if s.is_text and not s.module})
        found += names[:: max(1, len(names) // _PER_PATTERN)]
    return found


def _spread(names: Sequence[str], count: int) -> list[str]:
    known = [name for name in names if name in hot.ALL]
    others = [name for name in names if name not in hot.ALL]
    missing = max(count - len(known), 0)
    step = max(len(others) / missing, 1) if missing else 1
    return [*known, *(others[int(n * step)] for n in range(min(missing, len(others))))][:count]
