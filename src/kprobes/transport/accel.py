"""How QEMU runs the guest's instructions: with KVM where it truly is, else translated."""

import os
from enum import StrEnum
from pathlib import Path

from kprobes.errors import UnreachableError, UsageError

_DEVICE = Path("/dev/kvm")
# On x86-64 /dev/kvm alone proves nothing: on our build machines it opens, but is of a paravirtual
# kind that does not run stock kernels. On arm64 KVM is no module.
_SIGNS = {
    "x86_64": tuple(Path("/sys/module", name) for name in ("kvm_intel", "kvm_amd")),
    "aarch64": (_DEVICE,),
}


class Accel(StrEnum):
    """QEMU's name of an accelerator."""

    KVM = "kvm"
    TCG = "tcg"


def choose(
    wanted: str,
    native: str,
    *,
    machine: str | None = None,
    device: Path = _DEVICE,
    signs: tuple[Path, ...] | None = None,
) -> Accel:
    """Return the accelerator for ``auto``, ``kvm`` or ``tcg``.

    ``kvm`` is believed wherever its device opens, also without a sign that we know.

    Args:
        wanted: by the user.
        native: what a machine calls itself whose KVM runs such guests.
        machine: what this one calls itself.
        device: KVM's.
        signs: files, of which one is there where KVM is what it should be.

    Raises:
        UsageError: no such accelerator.
        UnreachableError: ``kvm`` where its device does not open, or is for other guests.
    """
    is_native = (machine or os.uname().machine) == native
    opens = is_native and os.access(device, os.R_OK | os.W_OK)
    signs = _SIGNS.get(native, ()) if signs is None else signs
    match wanted:
        case "auto":
            return Accel.KVM if opens and any(path.exists() for path in signs) else Accel.TCG
        case "tcg":
            return Accel.TCG
        case "kvm" if opens:
            return Accel.KVM
        case "kvm":
            raise UnreachableError(f"no KVM here: {_why_not(native, is_native, device)}")
        case _:
            raise UsageError(f"accelerator {wanted!r} is none of auto, kvm, tcg")


def _why_not(native: str, is_native: bool, device: Path) -> str:
    if not is_native:
        return f"this machine is no {native}; leave the accelerator to auto"
    reason = "may not be opened" if device.exists() else "does not exist"
    return f"{device} {reason}; leave the accelerator to auto"
