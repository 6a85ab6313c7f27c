"""Where files are kept, and how they are read and written: atomically, under locks, with printable names."""
