"""How QEMU runs the guest's instructions: with KVM where it truly is, else translated."""

import os
from enum import StrEnum
from pathlib import Path

from kprobes.errors import UnreachableError, UsageError

KVM = Path("/dev/kvm")
"""KVM's device."""


class Accel(StrEnum):
    """QEMU's name of an accelerator."""

    KVM = "kvm"
    TCG = "tcg"


def choose(
    wanted: str,
    native: str,
    *,
    signs: tuple[Path, ...],
    machine: str | None = None,
    device: Path = KVM,
) -> Accel:
    """Return the accelerator for ``auto``, ``kvm`` or ``tcg``.

    ``kvm`` is believed wherever its device opens, also without a sign that we know.

    Args:
        wanted: by the user.
        native: what a machine calls itself whose KVM runs such guests.
        signs: files, of which one is there where KVM is what it should be.
        machine: what this one calls itself.
        device: KVM's.

    Raises:
        UsageError: no such accelerator.
        UnreachableError: ``kvm`` where its device does not open, or is for other guests.
    """
    is_native = (machine or os.uname().machine) == native
    opens = is_native and os.access(device, os.R_OK | os.W_OK)
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
