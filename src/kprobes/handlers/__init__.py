"""Python at a probe: what a handler sees of a guest, and what it may do there."""
