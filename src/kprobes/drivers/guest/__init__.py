"""The engine for guests: hijack, arena, arm, drain, disarm."""
