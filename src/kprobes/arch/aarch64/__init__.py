"""The 64-bit Arm architecture."""
