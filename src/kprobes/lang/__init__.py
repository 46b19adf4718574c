"""Text to Definition and back, with the kernel's errors and carets."""
