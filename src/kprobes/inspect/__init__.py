"""A kernel and its text as they are, for `check`, `xray`, `status` and `doctor`."""
