"""Each test works in a folder of its own, with the eight volumes of the tests of data when it asks for them."""

from __future__ import annotations

from tests.data.conftest import _in_a_folder_of_its_own, folder

__all__ = ["_in_a_folder_of_its_own", "folder"]
