"""How QEMU runs the guest's instructions: with KVM where it truly is, else translated."""

import os
from enum import StrEnum
from pathlib import Path

from kprobes.errors import UnreachableError, UsageError

_DEVICE = Path("/dev/kvm")
# /dev/kvm alone proves nothing: on our build machines it opens, but is of a paravirtual kind
# that does not run stock kernels.
_MODULES = tuple(Path("/sys/module", name) for name in ("kvm_intel", "kvm_amd"))


class Accel(StrEnum):
    """QEMU's name of an accelerator."""

    KVM = "kvm"
    TCG = "tcg"


def choose(wanted: str, *, device: Path = _DEVICE, modules: tuple[Path, ...] = _MODULES) -> Accel:
    """Return the accelerator for ``auto``, ``kvm`` or ``tcg``.

    ``kvm`` is believed wherever its device opens, also without a module that we know.

    Raises:
        UsageError: no such accelerator.
        UnreachableError: ``kvm`` where its device does not open.
    """
    opens = os.access(device, os.R_OK | os.W_OK)
    match wanted:
        case "auto":
            return Accel.KVM if opens and any(path.exists() for path in modules) else Accel.TCG
        case "tcg":
            return Accel.TCG
        case "kvm" if opens:
            return Accel.KVM
        case "kvm":
            reason = "may not be opened" if device.exists() else "does not exist"
            raise UnreachableError(f"no KVM here: {device} {reason}; leave the accelerator to auto")
        case _:
            raise UsageError(f"accelerator {wanted!r} is none of auto, kvm, tcg")
