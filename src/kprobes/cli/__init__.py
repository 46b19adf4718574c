"""The kprobe command, one file per subcommand."""
