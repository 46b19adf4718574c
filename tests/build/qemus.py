"""Command lines of QEMU, for tests of what is told of guests."""

from kprobes.transport.running import CommandLine, parse_command


def command_line(words: str) -> CommandLine:
    """Return what a command line says that is QEMU's."""
    command = parse_command(words.split())
    assert command is not None
    return command
