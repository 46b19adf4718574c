"""Filters for the kernel and for us: every operator, every kind of field, every error.

An event with a field of every kind gets them all.
"""

from kprobes.model.abi import MAX_STRING

DEFINITION = (
    "p:all do_sys_openat2 n8=$arg4:u8 n16=$arg4:u16 n32=$arg4:u32 n64=$arg4:u64 x32=$arg4:x32 "
    "i8=$arg1:s8 i16=$arg1:s16 i32=$arg1:s32 i64=$arg1:s64 low=$arg4:b4@2/32 "
    "path=+0($arg2):ustring flags=+0($arg3):u64 bytes=+0($arg3):x8[4] three=+0($arg3):u8[3] "
    "words=+0($arg3):s32[2] caller=$stack0:symbol callers=$stack0:symstr "
    "names=+0($arg3):string[2] who=$comm "
    'said=\\"text"'
)

_OPERATORS = ["==", "!=", "<", "<=", ">", ">=", "&", "~"]
_FIELDS = [
    *("n8", "n16", "n32", "n64", "x32", "i8", "i16", "i32", "i64", "low", "path", "flags"),
    *("bytes", "three", "words", "caller", "callers", "names", "who", "said"),
    *("common_pid", "common_type", "common_flags", "common_preempt_count", "__probe_ip"),
    *("cpu", "CPU", "comm", "COMM", "common_cpu", "stacktrace", "STACKTRACE", "common_comm"),
    *("__probe_func", "common_tgid", "arg1", "n", "n888", "__data_loc", "ip"),
]
_LONG = "x" * 255
_MANY = " || ".join(["n8 == 1"] * 350)

_TREES = r"""
n8 == 1 && n16 == 2
n8 == 1 || n16 == 2
n8 == 1 && n16 == 2 || n32 == 3
n8 == 1 || n16 == 2 && n32 == 3
(n8 == 1)
((n8 == 1))
(n8 == 1 || n16 == 2) && n32 == 3
n32 == 3 && (n8 == 1 || n16 == 2)
!n8 == 1
!!n8 == 1
! n8 == 1
!(n8 == 1)
!(n8 == 1 || !(n16 == 2 && !n32 == 3))
! ( ! n8 == 1 )
(!(!(n8 == 1)))
n8==1
n8==1&&n16==2||n32==3
  n8 == 1
n8   ==   1
n8 == 1   &&   n16 == 2
n8	==	1
( n8 == 1 )
n8 == 1)
(n8 == 1
((n8 == 1)
(n8 == 1))
n8 == 1 && (n16 == 2
n8 == 1 && n16 == 2)
)n8 == 1(
(
)
()
( )
n8 == 1 && ()
() && n8 == 1
!
!!
!()
&&
||
&
n8
n8 ==
n8 ==@
== 1
1
0 == 1
1 == n8
"x"
n8 == 1 &&
n8 == 1 ||
n8 == 1 && &&
n8 == 1 && && n16 == 2
n8 == 1 || || n16 == 2
n8 == 1 !
n8 == 1 && !
&& n8 == 1
|| n8 == 1
n8 == 1 & n16 == 2
n8 == 1 | n16 == 2
n8 == 1 &&& n16 == 2
n8 == 1 n16 == 2
n8 == 1 (n16 == 2)
(n8 == 1) n16 == 2
(n8 == 1)(n16 == 2)
(n8 == 1) && (n16 == 2) || !(n32 == 3)
n8 == 1 and n16 == 2
n8 == 1, n16 == 2
n8 == 1;
(n8) == 1
n8 (== 1)
n8 == (1)
!=n8 1
!~n8 1
n8 !== 1
not n8 == 1
none
0
00
0x0
if n8 == 1
"""

_NUMBERS = r"""
n8 == 0
n8 == 0x10
n8 == 0X10
n8 == 010
n8 == 08
n8 == 0x
n8 == 1x
n8 == 1_000
n8 == +1
n8 == -1
n8 == - 1
n8 == --1
n8 == -
n8 == 255
n8 == 256
n8 == 1e3
n8 == 1.5
n8 == ff
n8 == 'a'
n8 == a
n8 == n16
n8 == 18446744073709551615
n8 == 18446744073709551616
n8 == 0xffffffffffffffff
n8 == 0x10000000000000000
n8 == 00000000000000000000001
n8 == 000000000000000000000001
n8 == 0000000000000000000000001
n64 == 18446744073709551615
i64 == 9223372036854775807
i64 == 9223372036854775808
i64 == -9223372036854775808
i64 == -9223372036854775809
i64 == -0x8000000000000000
i64 == -0
i8 == -1
i8 == 255
i8 == -129
i8 & -1
i32 < -100
low == 15
low == 16
common_pid == -1
common_pid > 0x7fffffff
cpu == -1
cpu == 99999999999
cpu & 1
n8 = 1
n8 =! 1
n8 => 1
n8 =< 1
n8 <> 1
n8 ! 1
n8 !1
n8 ~ 1
n8 ^ 1
n8 << 1
n8 >> 1
n8 && 1
n8 & 1
n8 &1
n8 && n16 == 1
n8 % 2
n8 === 1
n8 ==1==1
n8 == 1 == 1
n-8 == 1
n8.x == 1
n8[0] == 1
8n == 1
_n8 == 1
N8 == 1
$n8 == 1
%n8 == 1
caller == 0xffffffff81000000
caller == vfs_read
__probe_ip == 0
"""

_STRINGS = r"""
path == "/etc/passwd"
path == '/etc/passwd'
path == "it's"
path == 'say "x"'
path == "a" && path != "b"
path == ""
path != ""
path ~ ""
path == "x
path == 'x
path == "x'
path == x"
path == x
path == "x"y
path == "x" "y"
path == "x""y"
path == "a && b || (c)"
path == "a(b"
path == "a)b"
path == /etc
path ~ "/etc/*"
path ~ "*passwd"
path ~ "*etc*"
path ~ "/e?c/*"
path ~ "/[a-e]tc/*"
path ~ "/[!a-e]tc/*"
path ~ "[/"
path ~ "\*"
path ~ "*"
path ~ "**"
path ~ "***"
path ~ "!x"
path ~ "!*x"
path ~ "!"
path ~ "1*"
path ~ "*1*"
path !~ "x"
path ~= "x"
path ~ x
path =~ "x"
path < "x"
path & "x"
path >= "x"
path == 5
path == -5
path != 0x5
path ~ 5
path.ustring == "x"
path.ustring ~ "x*"
path.ustring
path .ustring == "x"
path.string == "x"
n8.ustring == 1
n8.ustring == "x"
comm.ustring == "x"
who == "sh"
who ~ "s*"
said == "text"
said ~ "t*"
names == "x"
names ~ "*x"
callers ~ "vfs_*"
callers == 5
caller ~ "vfs_*"
comm == "sh"
comm ~ "s*"
comm ~ "*h"
comm == sh
comm == 5
COMM != 'sh'
comm < "x"
comm == "a name that is longer than any"
bytes == "abcd"
bytes ~ "a*"
n64 ~ "x"
n64 == "x"
cpu == "x"
stacktrace == "x"
stacktrace ~ "x"
stacktrace == 1
three == 1
three == "x"
words == 1
words == -1
"""

_MASKS = r"""
cpu & CPUS{0}
cpu == CPUS{0}
cpu != CPUS{0-1}
cpu < CPUS{0}
cpu ~ CPUS{0}
cpu & CPUS{}
cpu & CPUS{0
cpu & CPUS 0
cpu & CPUS
cpu & CPU{0}
cpu & cpus{0}
cpu & CPUS {0}
cpu & CPUS{ 0 }
cpu & CPUS{0,1}
cpu & CPUS{0, 1}
cpu & CPUS{,}
cpu & CPUS{0-}
cpu & CPUS{-1}
cpu & CPUS{1-0}
cpu & CPUS{0-1}
cpu & CPUS{2}
cpu & CPUS{0-2}
cpu & CPUS{0-99999999999}
cpu & CPUS{99999999999999999999999}
cpu & CPUS{N}
cpu & CPUS{0-N}
cpu & CPUS{all}
cpu & CPUS{ALL}
cpu & CPUS{all:1/2}
cpu & CPUS{0-1:1/2}
cpu & CPUS{0-1:1/1}
cpu & CPUS{0-1:0/1}
cpu & CPUS{0-1:1/0}
cpu & CPUS{0-1:1}
cpu & CPUS{0:1/2}
cpu & CPUS{a}
cpu & CPUS{0x1}
cpu & CPUS{0}}
cpu & CPUS{0} && n8 == 1
n32 & CPUS{0-1}
n32 == CPUS{1}
n32 != CPUS{0-1}
i8 & CPUS{1}
common_pid & CPUS{0}
three & CPUS{0}
three & CPUS{0-1}
path & CPUS{0}
path == CPUS{0}
comm == CPUS{0}
stacktrace == CPUS{0}
"""

_FUNCTIONS = r"""
caller.function == vfs_read
caller.function != vfs_read
caller.function == vfs_read && n8 == 1
caller.function == vfs_read&& n8 == 1
(caller.function == vfs_read )
(caller.function == vfs_read)
caller.function < vfs_read
caller.function & vfs_read
caller.function ~ vfs_read
caller.function == no_such_function
caller.function == "vfs_read"
caller.function ==@
caller.function ==
caller.function == 0
caller.function == 0x10
caller.function == 0xzz
caller.function == 000000000000000000000000
caller.function == -1
n64.function == vfs_read
i64.function == vfs_read
flags.function == vfs_read
n32.function == vfs_read
path.function == vfs_read
words.function == vfs_read
__probe_ip.function == do_sys_openat2
comm.function == vfs_read
n64.ustring.function == vfs_read
n64.function.ustring == vfs_read
n64.function
"""

_LIMITS = [
    f'path == "{_LONG}"',
    f'path == "{_LONG}x"',
    f'path ~ "{_LONG}*"',
    f"{_LONG}x == 1",
    f"n8 == {'1' * 30}",
    "(" * 200 + "n8 == 1" + ")" * 200,
    "!" * 300 + "n8 == 1",
    _MANY,
    f"{_MANY} ||",
    f"n8 == 1{' ' * 4000}",
    f'path == "x" && n8 == {"9" * (MAX_STRING - 25)}',
    f"n8 == 1{' ' * 4100}",
]


def _crossed() -> list[str]:
    plain = [f"{field} {operator} 1" for field in _FIELDS for operator in ("==", "&", "~")]
    text = [f'{field} {operator} "x*"' for field in _FIELDS for operator in ("!=", "<", "~")]
    every = [f"{field} {operator} 3" for field in ("n8", "i16", "cpu") for operator in _OPERATORS]
    return [*plain, *text, *every]


def _corpus() -> list[str]:
    texts = [_TREES, _NUMBERS, _STRINGS, _MASKS, _FUNCTIONS]
    # An @ stands for a blank at a line's end.
    lines = [line.replace("@", " ") for text in texts for line in text.strip("\n").split("\n")]
    return list(dict.fromkeys([*lines, *_LIMITS, *_crossed()]))


CORPUS = _corpus()

SINCE = {
    "6.1": ("CPUS", ".function", "stacktrace", "STACKTRACE"),
    "6.12": (),
}
"""Words that a release does not know yet."""

DIFFERENCES = {
    # A fix that reached 6.1.y, and the 6.12.y behind ours: "Fix handling of an incomplete filter".
    "n8 == 1 &&": "accepted by 6.12.95",
    "n8 == 1 ||": "accepted by 6.12.95",
    "n8 == 1 && !": "accepted by 6.12.95",
    f"{_MANY} ||": "accepted by 6.12.95",
    f"n8 == 1{' ' * 4100}": "refused without a text",
    'callers ~ "vfs_*"': "a symstr's text is known on the host only",
    'callers != "x*"': "a symstr's text is known on the host only",
    'callers ~ "x*"': "a symstr's text is known on the host only",
}
"""Filters that the kernel and we judge differently, and why."""

HITS = {
    "": "all",
    # Signed numbers of every size, unsigned ones, bits, arrays.
    "dfd == -100": "all",
    "dfd != -100": "none",
    "dfd < 0": "all",
    "dfd > -101 && dfd < -99": "all",
    "dfd <= -101": "none",
    "dfd >= 0": "none",
    "dfd & 3": "none",
    "dfd & 0x80000000": "all",
    "tiny == 156": "all",
    "tiny == -100": "all",
    "tiny > 100": "none",
    "self != 0": "all",
    "flags & 0x1": "some",
    "flags == 0x8000": "some",
    "flags > 0x8000": "some",
    "flags <= 0x8000 && flags >= 0x8000": "some",
    "mode == 0x1b6": "some",
    "mode != 0": "some",
    "low == 0": "some",
    "low & 1": "some",
    "bytes == 0x8000": "some",
    "bytes > 0x8000": "some",
    "three == 1": "none",
    "three != 1": "none",
    "three & 1": "none",
    # Strings.
    'path == "/etc/passwd"': "some",
    "path == '/etc/group'": "some",
    'path != "/etc/passwd"': "some",
    'path == "/etc/passw"': "none",
    'path == "/etc/passwdx"': "none",
    'path == ""': "none",
    'path != ""': "all",
    'path ~ ""': "none",
    'path ~ "/etc/passwd"': "some",
    'path ~ "/etc/*"': "some",
    'path ~ "*passwd"': "some",
    'path ~ "*tc/p*"': "some",
    'path ~ "/etc*wd"': "some",
    'path ~ "*o*n*m*_*f*"': "some",
    'path ~ "/e?c/*"': "some",
    'path ~ "/[d-f]tc/*"': "some",
    'path ~ "/[!d-f]*s*"': "some",
    'path ~ "[a-z]*"': "some",
    'path ~ "?"': "some",
    'path ~ "? ?"': "some",
    'path ~ "1*"': "some",
    r'path ~ "?\*"': "some",
    'path ~ "[1]*"': "some",
    # Some paths cannot be read.
    'path ~ "*"': "some",
    'path ~ "***"': "some",
    'path ~ "!*"': "some",
    'path ~ "!*etc*"': "some",
    'path ~ "!/etc/passwd"': "some",
    'path ~ "[/"': "none",
    # Tasks.
    'comm == "cat"': "some",
    'comm != "cat"': "some",
    'comm ~ "c*"': "some",
    'comm ~ "[c]?t"': "some",
    'COMM ~ "?a*"': "some",
    'comm == "catx"': "none",
    'comm == "a name that is longer than any"': "none",
    'who == "cat"': "some",
    'who ~ "*at"': "some",
    'who ~ "*a*"': "some",
    'said == "text"': "all",
    'said ~ "x*"': "none",
    "common_pid & 1": "some",
    "common_pid > 1": "all",
    "common_pid < 0": "none",
    "cpu == 0": "some",
    "cpu != 0": "some",
    "cpu < 2": "all",
    "CPU >= 1": "some",
    "cpu & 1": "none",
    "cpu & CPUS{0}": "some",
    "cpu == CPUS{1}": "some",
    "cpu != CPUS{1}": "some",
    "cpu & CPUS{0-1}": "all",
    "cpu == CPUS{0-1}": "none",
    "cpu != CPUS{0-1}": "all",
    "mode & CPUS{0-1}": "some",
    "mode != CPUS{0-1}": "some",
    "low == CPUS{1}": "some",
    "stacktrace != 1": "none",
    "__probe_ip != 0": "all",
    "__probe_ip.function == do_sys_openat2": "all",
    "caller.function == vfs_read": "none",
    "caller.function != vfs_read": "all",
    # Operators.
    'path ~ "/etc/*" && comm == "cat"': "some",
    'path ~ "/etc/*" || comm == "wc"': "some",
    'comm == "cat" && path ~ "/etc/*" || comm == "wc" && flags == 0x8000': "some",
    '(comm == "cat" || comm == "wc") && (path ~ "/etc/*" || path == "x")': "some",
    '!comm == "cat"': "some",
    '!!comm == "cat"': "some",
    '!(comm == "cat" || comm == "wc")': "some",
    '!(comm == "cat" && path == "x") && path == "x"': "some",
    '!(path == "x" || !(comm == "cat" && !flags & 1))': "some",
    '!(!(comm == "cat" || flags & 1) && !(path ~ "/*"))': "some",
    'comm == "cat" && cpu == 0 && flags == 0x8000 && path ~ "/etc/*" && low == 0': "some",
    'cpu == 7 || path == "x" || flags & 0x40': "some",
}
"""Filters of do_sys_openat2, and how many hits of the workload they choose."""
