"""Names to addresses, offsets and record layouts."""
