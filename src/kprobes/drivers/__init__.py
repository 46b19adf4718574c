"""Prepare, arm, drain, disarm; the undo journal."""
