"""Latents of the same eight volumes that the tests of data use."""

from __future__ import annotations

from tests.data.conftest import folder

__all__ = ["folder"]
