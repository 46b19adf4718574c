"""Bytes to facts and back; each file names where its format is written down."""
