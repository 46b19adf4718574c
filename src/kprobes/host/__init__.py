"""The kernel that this machine runs, through its tracefs."""
