"""Code generator: plans to machine code, with one door to LLVM."""
