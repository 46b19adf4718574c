"""The frozen nouns of the road from text to events, one file per stop."""
