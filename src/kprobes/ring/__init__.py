"""Ring bytes to columns."""
