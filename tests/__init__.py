"""Mirrors the tree. A package, so that a library that installs its own `tests` does not hide it."""
