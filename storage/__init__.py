"""Where files lie and how they are written: whole or not at all, locked, and with printable names."""
