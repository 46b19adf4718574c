"""Functions of every path of a kernel that a load makes run, found by probing their entries."""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from kprobes.guest.places import places_of
from kprobes.open import GuestSession
from tests.build import hot
from tests.build.defined import delete_all, recorded_by_event
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

VARIETY_FILES = {
    "/variety.sh": rb"""
mkdir /tmp/v
cd /tmp/v
exec > /dev/null 2>&1
while :; do
    ls -d /proc/[a-z]* /proc/self/* /proc/net/* | grep -v 'kmsg\|kcore\|page' > names
    timeout 1 head -c 999 $(cat names)
    timeout 1 head -c 99 $(find /sys -maxdepth 6 -name '[a-z]*_*' -type f | head -n 300)
    for kind in tmpfs proc sysfs devtmpfs devpts ramfs cgroup2 debugfs securityfs; do
        mkdir -p m && mount -t $kind none m && { ls m; df m; stat m; umount m; }
    done
    mkfifo p; mknod n c 1 3; echo a > a; ln a b; ln -s a l; readlink -f l; chown 1:1 a; chmod 600 a
    touch -d @1 a; truncate -s 100k t; dd if=a of=t seek=9 conv=notrunc,fsync; cp -a . ../w; mv a c
    flock c true; fallocate -l 64k f; split -b 1k t x; tar cf o.tar t c; tar tf o.tar; sync; fsync t
    cat l p < /dev/null & sleep 0.01; echo > p; rm -rf ../v/* ../w
    ifconfig; route -n; netstat -an; ip addr; ip route; ip neigh; arp -n
    ps -o pid,comm,stat; free; uptime; top -b -n 1; nice -n 5 id
    ping -c 1 -w 1 127.0.0.1
    ip link add d0 type dummy; ip link set d0 up; ip addr add 10.9.9.9/24 dev d0; ip link del d0
    ip tuntap add mode tap t0; ip link del t0; (echo x | timeout 0.2 nc -u 127.0.0.1 9); hostname h
    chrt -b 0 true; ionice -c 3 true; setsid true; taskset 1 true; renice -n 1 $$; renice -n 0 $$
    swapoff -a; losetup -a; blkid; lsof; fuser -m /; sysctl -a; dmesg; mesg n; stty -a < /dev/ttyS0
    usleep 50000 & kill -STOP $!; kill -CONT $!; sh -c 'trap : USR1; kill -USR1 $$; ulimit -a'
    (ulimit -t 1; ulimit -v 50000; true); chroot / true; unshare -n true; unshare -m -u -i true
    watch -n 1 true & sleep 0.02; kill $!; readahead t; usleep $1
done
"""
}
"""What makes the most different functions run, once and again."""

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


def found_running(session: GuestSession, count: int, *, for_s: float = 2.0) -> list[str]:
    """Return the names of some functions that ran within a while, the well-known ones first."""
    symbols = session.kernel.symbols
    names = list(dict.fromkeys([*hot.ALL, *matching(session)]))
    has_site = places_of(session.driver.guest).has_site
    probed = [
        name
        for name in names
        if len({s.addr for s in symbols.all_named(name)}) == 1 and has_site(symbols.named(name))
    ]
    session.options = replace(session.options, strategy=None)
    delete_all(session)
    session.probe("\n".join(f"p:r{n} {name}" for n, name in enumerate(probed)))
    until = time.monotonic() + for_s + len(probed) / 1000
    session.stream(Nothing(), is_done=lambda: time.monotonic() > until)
    counts = recorded_by_event(session)
    ran = [name for n, name in enumerate(probed) if counts[f"r{n}"]]
    return _spread(ran, count)


def matching(session: GuestSession) -> list[str]:
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
