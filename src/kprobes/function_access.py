"""Functions of a kernel are called or skipped, besides being probed."""

from abc import abstractmethod
from typing import SupportsIndex, Unpack

from kprobes.guest.call import Functions
from kprobes.guest.override import ActiveOverride
from kprobes.live_access import LiveAccess
from kprobes.model.override import OverrideOptions, OverrideWords, errno_value, with_comm


class FunctionAccess(LiveAccess):
    """Calls and skips a guest's functions; of this machine's own that is a NotSupportedError."""

    @property
    @abstractmethod
    def _functions(self) -> Functions:
        """What does so, or UsageError when the session is closed."""

    def call(self, function: str, *args: SupportsIndex, timeout_s: float = 10.0) -> int | None:
        """Call a function, ``kernel.call("int_sqrt", 144)``, and return what it returns.

        Args:
            function: its name, or ``MODULE:FUNCTION``.
            args: numbers, and addresses.
            timeout_s: how long it may take; then its task goes on with it, alone.

        Raises:
            UsageError: the arguments are not its.
            TargetError: it must not be called, or did not come back in time.
        """
        return self._functions.call(function, args, timeout_s)

    def override(
        self, function: str, *, returns: int, **options: Unpack[OverrideWords]
    ) -> ActiveOverride:
        """Have calls of a function return a value and its code not run: howto/fail.md.

        ``kernel.override("__x64_sys_getpid", returns=42, filter='comm == "sh"')``

        Args:
            function: its name, or ``MODULE:FUNCTION``.
            returns: the value; 0 for a function that returns nothing.
            options: ``filter`` that a call must pass, then ``every`` so-manieth, ``probability``
                from 0 to 1, ``times`` at most; ``force`` what the kernel does not list as safe.

        Raises:
            RefusedError: it must not be skipped, or must not return that.
        """
        return self._functions.overrides.add(function, returns, OverrideOptions(**options))

    def fail(
        self, function: str, *, errno: int, comm: str = "", **options: Unpack[OverrideWords]
    ) -> ActiveOverride:
        """Have calls fail with an errno, with or without a minus; else as ``override``.

        ``kernel.fail("__x64_sys_openat", errno=errno.ENOSPC, comm="cat", every=10)``

        Args:
            function: as of ``override``.
            errno: such as ``errno.ENOMEM``.
            comm: only calls by tasks whose name matches this pattern.
            options: as of ``override``.
        """
        return self.override(function, returns=errno_value(errno), **with_comm(options, comm))
