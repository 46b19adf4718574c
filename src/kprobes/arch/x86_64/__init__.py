"""x86-64: registers, paging, call frames, encodings."""
