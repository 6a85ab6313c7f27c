"""Mirrors the tree. A package, so that the one some library installs under this name does not hide it."""
