"""Skill: a network's held-out error, divided by that of the best linear denoiser."""

from training.validation.skill.held_out import NUM_LEVELS, HeldOut, Skill, skill_in_words
from training.validation.skill.linear_denoiser import LinearDenoiser

__all__ = ["NUM_LEVELS", "HeldOut", "LinearDenoiser", "Skill", "skill_in_words"]
