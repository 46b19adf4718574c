"""Debug information, as DWARF has it: lines, inlined copies, variables and where they live."""
