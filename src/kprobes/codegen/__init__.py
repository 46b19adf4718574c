"""Plans to machine code; one door to LLVM."""
