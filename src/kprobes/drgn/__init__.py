"""A guest as a program of drgn's: its memory, our types, names. drgn itself is an extra."""
