"""What samples are conditioned on: a file for each kind of condition, and how batches get them."""

from __future__ import annotations

from diffusion.conditioning.batch import NOTHING, ConditionBatch, empty_condition, error_weights, hidden, some_hidden
from diffusion.conditioning.kind import Preparation
from diffusion.conditioning.kinds import KINDS, kinds_of
from diffusion.conditioning.store import ConditionStore, Pairs, check_conditions, find_partners_of, prepare_conditions

__all__ = [
    "KINDS",
    "NOTHING",
    "ConditionBatch",
    "ConditionStore",
    "Pairs",
    "Preparation",
    "check_conditions",
    "empty_condition",
    "error_weights",
    "find_partners_of",
    "hidden",
    "kinds_of",
    "prepare_conditions",
    "some_hidden",
]
