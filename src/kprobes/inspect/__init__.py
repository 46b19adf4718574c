"""What a kernel is and what is in its text, for `check`, `xray`, `status` and `doctor`."""
