"""The memory guide: its techniques, and the stored predictions that it shows."""
