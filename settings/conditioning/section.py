"""What the settings say of every kind of condition; each kind has a section of its own with this as its base."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from settings.errors import Problem
from settings.section import Section

if TYPE_CHECKING:
    from settings.root import Settings

Found = Iterator[tuple[Problem, tuple[str, ...]]]
"""Problems, each with the other keys involved."""


class ConditionSection(Section):
    """The keys of one kind of condition."""

    @property
    def is_used(self) -> bool:
        """Return whether samples are conditioned on it."""
        raise NotImplementedError

    @property
    def is_ever_hidden(self) -> bool:
        """Return whether training hides it from time to time."""
        return self.is_used

    @property
    def describes_volume(self) -> bool:
        """Return whether it says what a sample should look like, so that it can be compared with a volume."""
        return self.is_used

    @property
    def embedded_numbers(self) -> dict[str, int]:
        """Return the names of what the U-Net embeds, with how many numbers each is."""
        return {}

    def num_concatenated(self, latent_channels: int) -> int:
        """Return the number of channels that are concatenated to a noisy latent of `latent_channels` channels."""
        return 0

    def problems(self, settings: Settings) -> Found:
        """Yield each problem with the keys."""
        yield from ()
