"""May it be probed, and how: patches."""
