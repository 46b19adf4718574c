#!/bin/busybox sh
# usage: kprobes-agent TTY DIRECTORY
# Runs commands for the host. A request is one line of shell that calls a function below; what is
# answered stands in transport/agent.py. While a command runs this process sleeps in read(2) and
# the command's keeper in wait4(2), so that both stay out of traces.
tty=$1 dir=$2
mkdir -p "$dir"
exec 3<>"$tty" </dev/null >/dev/null 2>&1
stty -F "$tty" raw -echo 115200

# Several commands may end at once: who answers holds the only line of this FIFO. (Debian's
# busybox has no flock.)
rm -f "$dir/turn"
mkfifo "$dir/turn"
exec 4<>"$dir/turn"
echo >&4

# start ID HOW COMMAND: HOW is "told" when the host waits for the command's pid, "held" when the
# command is not to begin before the host's "go ID", else "quiet".
# The keeper is made a child of init: the end of a child of ours would interrupt the read below,
# which then begins anew and loses what it had of its line.
start() {
    (keep "$@" &)
}

keep() {
    # A command may be killed before it has made its own.
    : >"$dir/$1"
    if [ "$2" = held ]; then
        # Open here all the time, so that a word which comes early is not lost.
        mkfifo "$dir/$1.up" "$dir/$1.go"
        exec 5<>"$dir/$1.go" 6<>"$dir/$1.up"
        set -- "$1" "$2" "$3" 'echo >&6; read -r go <&5; exec /bin/sh -c "$0" sh 5<&- 6<&-'
    fi
    setsid sh -c "${4:-$3}" "$3" >"$dir/$1" 2>&1 3>&- 4>&- &
    pid=$!
    echo $pid >"$dir/$1.pid"
    if [ "$2" = held ]; then
        # Its next exec must be the command's own. Killed before, it says nothing.
        until read -t 1 -r up <&6 || [ ! -e /proc/$pid/exe ]; do :; done
    fi
    if [ "$2" != quiet ]; then
        read -r turn <&4
        echo "started $1 $pid" >&3
        echo >&4
    fi
    wait $pid
    status=$?
    read -r turn <&4
    out=$dir/$1
    size=$(stat -c %s "$out")
    sent=$size packed=0
    # The port takes 0.5 to 1 MB/s, gzip makes 20 MB/s and text a tenth of its size.
    if [ "$size" -gt 16384 ] && head -c "$size" "$out" | gzip -c >"$out.gz"; then
        out=$out.gz packed=1
        sent=$(stat -c %s "$out")
    fi
    echo "done $1 $pid $status $packed $size $sent" >&3
    # What a child left behind still writes is not part of it.
    head -c "$sent" "$out" >&3
    echo >&4
    rm -f "$dir/$1" "$dir/$1.pid" "$dir/$1.gz" "$dir/$1.up" "$dir/$1.go"
}

# go ID: lets a command begin that is held.
go() {
    [ -p "$dir/$1.go" ] && echo 1<>"$dir/$1.go"
}

# stop ID: kills a command and all of its session that did not leave the process group.
stop() {
    pid=
    for again in 1 2 3 4 5; do
        read -r pid <"$dir/$1.pid" && break
        sleep 0.02
    done
    [ -n "$pid" ] && kill -KILL -- "-$pid" "$pid"
}

# size ROWS COLUMNS: of the user's terminal, for the shell on the console.
size() {
    stty -F /dev/console rows "$1" cols "$2"
}

echo ready >&3
while IFS= read -r request <&3; do
    eval "$request"
done
