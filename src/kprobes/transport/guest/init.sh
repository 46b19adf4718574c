#!/bin/busybox sh
# The first process of the guest: mounts, then the agent on its port and a shell on the console.
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root TERM=vt100 PS1='guest# '

# The archive has the links already, unless it was made on a machine that cannot run this busybox.
[ -e /bin/mount ] || /bin/busybox --install -s

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
# Not every kernel has these.
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
hostname guest
ifconfig lo up 2>/dev/null

cd /root
read -r port </etc/kprobes-agent
(while :; do setsid /sbin/kprobes-agent "/dev/$port" /run/kprobes; done) &
while :; do setsid cttyhack sh; done
