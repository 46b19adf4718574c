"""What all tests need: a default target that is nobody's own machine, and time."""

import os

from hypothesis import settings

os.environ.setdefault("KPROBES_TARGET", "guest")
# How long one example takes is told by whatever else this machine does.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
