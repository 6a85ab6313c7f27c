"""What developers run: the seeded faults, and generators of documents."""
