"""The ladder: which changes to a config lower its memory, in which order to try them, and which one to take."""
