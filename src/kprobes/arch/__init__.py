"""One value of facts and functions per instruction set."""
