"""Hist triggers, line by line: those of the kernel's selftests of ``trigger/``, and more.

They are of an event with the fields ``count`` and ``where``, of 64 bits, and ``small``, of 8.
"""

LINES = """\
hist:keys=count:vals=small
hist:keys=count,small
hist:keys=common_pid
hist:key=count:val=small
hist:key=count:val=small:sort=count
hist:keys=count,small:sort=small.ascending
hist:keys=count,small:sort=small.descending
hist:keys=count,small:sort=count.descending,small
hist:keys=count,small:sort=hitcount
hist:keys=common_pid.execname
hist:keys=count.hex
hist:keys=count.log2
hist:keys=count.buckets=10
hist:keys=count.buckets=0
hist:keys=count.buckets
hist:keys=count.bucket=10
hist:keys=where.sym:vals=count
hist:keys=where.sym-offset:vals=count
hist:keys=where.sym-offset:vals=count.hex
hist:keys=where.usecs
hist:keys=count.execname
hist:keys=common_timestamp
hist:keys=common_timestamp.usecs
hist:keys=count.stacktrace
hist:keys=cpu
hist:keys=common_cpu
hist:keys=count:vals=count.percent
hist:keys=count:vals=count.graph
hist:keys=count.percent
hist:keys=count:vals=count.log2
hist:keys=count:vals=count.execname
hist:keys=count:vals=count.sym
hist:keys=count:vals=hitcount
hist:keys=count:vals=hitcount,small
hist:keys=count:vals=count,small,where
hist:keys=count:vals=
hist:keys=count:vals=,
hist:keys=count:vals=count,
hist:keys=count:vals=junk
hist:keys=
hist:keys=junk
hist:keys=count,
hist:keys=,count
hist:keys=count,,small
hist
hist:
hist:vals=count
hist:sort=count
hist:junk
hist:keys=count:junk
hist:keys=count:keys=small
hist:keys=count:vals=small:vals=count
hist:keys=count:pause
hist:keys=count:cont
hist:keys=count:continue
hist:keys=count:clear
hist:keys=count:pause:clear
hist:keys=count:nohitcount
hist:keys=count:NOHC
hist:keys=count:vals=small:nohc
hist:keys=count:size=128
hist:keys=count:size=100
hist:keys=count:size=127
hist:keys=count:size=0
hist:keys=count:size=-1
hist:keys=count:size=junk
hist:keys=count:size=
hist:keys=count:size=131072
hist:keys=count:size=131073
hist:keys=count:size=0x200
hist:keys=count:name=foo
hist:keys=count:name=
hist:name=foo:keys=count
hist:keys=common_pid:vals=count:sort=common_pid,junk
hist:keys=common_pid:vals=count:sort=
hist:keys=common_pid:vals=count:sort=common_pid,
hist:keys=common_pid:vals=count:sort=common_pid.junk
hist:keys=common_pid:vals=count,small:sort=common_pid,count,small
hist:keys=common_pid:sort=common_pid:sort=hitcount
hist:keys=count,small,where
hist:keys=count,small,where,common_pid
hist:keys=count:x=$y
hist:keys=count:vals=$x
hist:keys=count:vals=count+
hist:keys=count:x=count+small:vals=$x
hist:keys=count:onmax($x).save(count)
hist:keys=count:onmatch(sched.sched_switch).trace(foo)
hist:keys=count if count > 5
hist:keys=count if junk > 5
hist:keys=count if
hist:keys=count if count >
hist:keys=count:5
hist:5:keys=count
hist:keys=count:vals=small.junk
hist:keys=count.junk
hist:keys=count.
hist:keys=.log2
hist:keys=count.log2.hex
hist:keys=common_type
hist:keys=__probe_ip
hist:keys=count:vals=common_timestamp
hist:keys=count:sort=count.hex
hist:keys=count.hex:sort=count.hex
hist:keys=count:clock=global
hist:keys=count:clock=junk
hist: keys=count
hist:keys = count
hist:keys=count :vals=small
HIST:keys=count
hist:KEYS=count
hist:keys=Count
hist:keys=count:junk=1
hist:keys=count:x=small
hist:keys=count:x=small,y=count-small
hist:keys=count:x=small:x=count
hist:keys=count:x=1,y
hist:keys=count:vals=count-small
hist:keys=count:vals=count-small,count*2+small/3
hist:keys=count-small:sort=count-small
hist:keys=count-small:sort=count
hist:keys=-(count+small)
hist:keys=-(count-small)
hist:keys=-(count)+1
hist:keys=-(count)-1
hist:keys=-(count)-1-2-3
hist:keys=-count
hist:keys=count/0
hist:keys=count/3*2
hist:keys=count+small+1+2
hist:keys=count+small+1+2+3
hist:keys=count+12x
hist:keys=count+0x12
hist:keys=count++small
hist:keys=count.log2-small
hist:keys=count:vals=count.usecs-small
hist:keys=count:vals=10/3
hist:keys=$x:x=count
hist:keys=count:ts0=common_timestamp
hist:keys=count:vals=small: sort=count
hist:keys=count:vals=$x:x=small
hist:keys=count:vals=$x:x=$y:y=small
hist:keys=count:x=small:onmax($x).save(count)
hist:keys=count:x=small:onchange($x).save(count)
hist:keys=count:x=small:onmax($x).save(count,where,small)
hist:keys=count:x=small:onmax($x).save( count , where )
hist:keys=count:x=small-1:onmax($x).save(count.hex,where.sym)
hist:keys=count:x=small,y=count:onchange($y).save(where) if count > 3
hist:onmax($x).save(count):keys=where:x=small
hist:keys=count:x=small:vals=where:onmax($x).save(count)
hist:keys=count:x=small:onmax($y).save(count)
hist:keys=count:x=small:onmax(x).save(count)
hist:keys=count:x=small:onmax(small).save(count)
hist:keys=count:x=small:onmax($).save(count)
hist:keys=count:x=small:onmax($x)
hist:keys=count:x=small:onmax($x).
hist:keys=count:x=small:onmax($x).save
hist:keys=count:x=small:onmax($x).save()
hist:keys=count:x=small:onmax($x).save(count
hist:keys=count:x=small:onmax($x).save(count,)
hist:keys=count:x=small:onmax($x).save(junk)
hist:keys=count:x=small:onmax($x).save(count+1)
hist:keys=count:x=small:onmax($x).save(count,count)
hist:keys=count:count=small:onmax($count).save(count)
hist:keys=count:x=small:onmax($x.save(count)
hist:keys=count:x=small:onmax $x.save(count)
hist:keys=count:x=small:onmax($x).save(count):onmax($x).save(where)
hist:keys=count:x=small:onmax($x).save(count):onchange($x).save(where)
hist:keys=count:x=small:onmax($x).saved(count)
hist:keys=count:x=small:onmax($x).junk(count)
hist:keys=count:x=small:onmax($x).save(count,where.usecs)
"""
"""Those of which the kernel's verdict is ours."""
NEWER = """\
hist:keys=comm
hist:keys=count:vals=hitcount.percent
hist:keys=count:vals=small:nohitcount
hist:keys=count:vals=small:NOHC
hist:keys=hitcount
"""
"""Those that kernels have learnt after 6.1."""
NOT_OURS = """\
hist:keys=$x:x=count+1
hist:keys=count.syscall
hist:keys=stacktrace
hist:keys=count:x=small:onmax($x).snapshot()
hist:keys=common_flags
hist:keys=common_preempt_count
"""
"""Those that are refused with words: docs/reference/hist.md."""
