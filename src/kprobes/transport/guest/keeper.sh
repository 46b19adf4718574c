#!/bin/sh
# usage: keeper.sh DIRECTORY RAM_DIRECTORY COMMAND...
# Runs QEMU, and ends it and removes its directories when standard input closes: that is when our
# Python lets go of the guest, or has died, however it died. A parent-death signal would not do:
# it comes when the thread that started the guest ends.
directory=$1 ram=$2
shift 2
exec 3<&0 </dev/null

"$@" 3<&- >"$directory/qemu.log" 2>&1 &
qemu=$!
(
    read -r nothing <&3
    # Once QEMU is gone its number may belong to somebody else.
    [ -e "$directory/ended" ] || kill -KILL $qemu
) >/dev/null 2>&1 &
watcher=$!
exec 3<&-

# From here on nothing may end this shell before its work is done: nobody may listen to it any
# more, and it would tell our terminal that QEMU was killed.
trap '' PIPE HUP INT TERM
exec 2>/dev/null
echo $qemu
wait $qemu
status=$?
: >"$directory/ended"
echo "ended $status"
wait $watcher
rm -rf "$directory" "$ram"
