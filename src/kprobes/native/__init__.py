"""Work on many rows in C, which LLVM compiles for this machine when there are many."""
