"""What all tests need: a default target that is nobody's own machine."""

import os

os.environ.setdefault("KPROBES_TARGET", "guest")
