"""The engine for guests: call injection, arena, arm, drain, disarm, the undo journal."""
