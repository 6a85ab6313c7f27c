"""The replayed allocator follows CUDA's rules, and two updates of a run are made of one tracked step."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from memory.predict.allocator import AllocatorLimits, CachingAllocator, replay_pinned, replay_training
from memory.predict.prediction import MIB
from memory.predict.tracker import MemoryTracker, StepEvents

DEFAULT = AllocatorLimits()
EXPANDABLE = AllocatorLimits(expandable_segments=True)
SPLIT = AllocatorLimits.parse("max_split_size_mb:128")
EMPTY = "empty the cache"


def after(limits, events):
    """Return an allocator after some events: a number of MiB is allocated, ~n releases the nth allocation."""
    allocator = CachingAllocator(limits)
    blocks: list[Any] = []
    for event in events:
        if event == EMPTY:
            allocator.empty_cache()
        elif event < 0:
            allocator.release(*blocks[~event])
        else:
            nbytes = int(event * MIB)
            blocks.append((allocator.allocate(nbytes), nbytes))
    return allocator


# What is reserved in MiB, after events.
CASES: dict[str, list[tuple[AllocatorLimits, list[Any], int]]] = {
    "small requests share a segment": [(DEFAULT, [1 / MIB, 513 / MIB, 1], 2)],
    "large requests get segments by their size": [
        *((DEFAULT, [size], 20) for size in (1.5, 9.9)),
        *((DEFAULT, [size], segment) for size, segment in ((10, 10), (11, 12), (100, 100), (100.5, 102))),
    ],
    "the best fit is split, and the larger block stays whole": [(DEFAULT, [64, 32, ~0, ~1, 30, 64], 96)],
    "fragments cannot hold what an expandable segment can": [
        (DEFAULT, [64, 64, ~0, ~1, 128], 256),
        (EXPANDABLE, [64, 64, ~0, ~1, 128], 140),  # 7 pieces of 20 MiB hold the first two, and grow for the third
    ],
    "neighbours merge in any order": [
        (EXPANDABLE, [20, 20, 20, *order, 60], 60) for order in ([~0, ~1, ~2], [~2, ~1, ~0], [~0, ~2, ~1], [~1, ~0, ~2])
    ],
    "a limit on splitting keeps large blocks from small requests": [
        (SPLIT, [200, ~0, 50], 250),
        (DEFAULT, [200, ~0, 50], 200),
        # A large request takes a large block only if hardly anything of it is wasted.
        (SPLIT, [200, ~0, 150], 350),
        (SPLIT, [200, ~0, 190], 200),
    ],
    # It counts as all that the segment can still become, so a larger block inside the segment fits better: 40 MiB go
    # into block 0, so 50 MiB grow the end by 20.
    "the end of an expandable segment is taken last": [(EXPANDABLE, [60, 20, 40, ~0, ~2, 40, 50], 140)],
    "of equal free blocks the one in the oldest segment is taken": [(DEFAULT, [64, 32, ~0, 32, ~1, 32, EMPTY], 64)],
    "an emptied cache has no unused segments": [(DEFAULT, [12, 24, ~1, EMPTY], 12)],
    "an emptied cache has no whole pages, and holes are mapped again": [
        (EXPANDABLE, [60, 60, 60, ~1, EMPTY], 120),
        (EXPANDABLE, [60, 60, 60, ~1, EMPTY, 30], 160),  # two pages of the hole
    ],
    "what is unmapped at the end joins what was never mapped": [
        (EXPANDABLE, [40, 30, ~1, 8, EMPTY], 60),
        # The 12 MiB before the end can grow without limit, so the 40 MiB count as the better fit and are split.
        (EXPANDABLE, [40, 30, ~1, 8, EMPTY, ~0, 10, 40], 100),
    ],
    "holes side by side are one": [
        (EXPANDABLE, [30, 30, 40, 40, 20, ~1, EMPTY, ~2, EMPTY, ~3], 100),
        # The 10 MiB below the holes count as 70 with both of them, so the free 40 MiB fit better and are split.
        (EXPANDABLE, [30, 30, 40, 40, 20, ~1, EMPTY, ~2, EMPTY, ~3, 6, 40], 140),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_segments_are_reserved_split_and_given_back_as_on_a_gpu(name):
    for limits, events, reserved in CASES[name]:
        assert after(limits, events).reserved == reserved * MIB, events


def test_sizes_are_rounded_up_and_a_remainder_up_to_one_mebibyte_stays():
    assert after(DEFAULT, [1 / MIB, 513 / MIB, 1]).peak_allocated == 512 + 1024 + MIB
    assert after(DEFAULT, [32, ~0, 31]).allocated == 32 * MIB


@pytest.mark.parametrize("limits", [DEFAULT, EXPANDABLE])
def test_random_trace_keeps_its_totals_consistent(limits):
    rng = random.Random(0)
    allocator = CachingAllocator(limits)
    alive: list[tuple] = []
    for _ in range(3000):
        if alive and rng.random() < 0.5:
            allocator.release(*alive.pop(rng.randrange(len(alive))))
        else:
            nbytes = int(2 ** rng.uniform(0, 27))
            alive.append((allocator.allocate(nbytes), nbytes))
        assert allocator.reserved >= allocator.allocated >= sum(nbytes for _, nbytes in alive)
    for block, nbytes in alive:
        allocator.release(block, nbytes)
    assert allocator.allocated == 0
    free = sum(size for pool in allocator._pools.values() for size, *_ in pool.free)
    assert free == allocator.reserved


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorLimits()),
        ("expandable_segments:True", AllocatorLimits(expandable_segments=True)),
        ("expandable_segments:False,max_split_size_mb:64", AllocatorLimits(max_split_bytes=64 * MIB)),
        (" max_split_size_mb:64 , expandable_segments:true", AllocatorLimits(True, 64 * MIB)),
    ],
)
def test_settings_of_the_allocator_are_read_as_torch_reads_them(text, expected):
    assert AllocatorLimits.parse(text) == expected


def test_pinned_blocks_are_powers_of_two_and_used_again():
    sizes = [3 * MIB, 4 * MIB, 5 * MIB, 0]
    assert replay_pinned([0, ~0, 1, 3, 2], sizes) == 4 * MIB + 8 * MIB


class Recorder:
    """Records what an allocator is asked for, where an allocation of n + 1 bytes is the nth of a trace."""

    def __init__(self, limits):
        self.events = []

    def allocate(self, nbytes):
        self.events.append(nbytes - 1)

    def release(self, block, nbytes):
        self.events.append(~(nbytes - 1))

    def empty_cache(self):
        self.events.append(EMPTY)


@pytest.fixture
def updates(monkeypatch):
    """Return what two updates of a tracked step allocate and release."""
    monkeypatch.setattr("memory.predict.allocator.CachingAllocator", Recorder)

    def record(trace, categories, step, gradients, updaters, trials=()):
        tracker: Any = MemoryTracker()
        tracker.trace, tracker.step, tracker.benchmarked = trace, StepEvents(*step), list(trials)
        sizes = enumerate(categories, start=1)
        tracker.allocations = [SimpleNamespace(nbytes=n, category=name, place="device") for n, name in sizes]
        tracker.first_gradients, tracker.updaters = gradients, updaters
        allocator: Any = replay_training(tracker, DEFAULT)
        return allocator.events

    return record


WEIGHT, STATE, INPUT, ACTIVATION, GRADIENT, ORIGINAL, TEMPORARY = range(7)
CATEGORIES = ["parameters", "optimizer", "inputs", "", "gradients", "parameters", ""]
PARAMETER = 0
ONE = {"gradients": {PARAMETER: GRADIENT}, "updaters": [(INPUT, {PARAMETER})]}
TRACE = [WEIGHT, STATE, INPUT, ACTIVATION, GRADIENT, ~ACTIVATION, ~INPUT, ~GRADIENT]
MICRO_BATCH = [INPUT, ACTIVATION, GRADIENT, ~ACTIVATION, ~INPUT]


def test_each_micro_batch_brings_its_input_and_optimizer_states_come_after_the_first_backward(updates):
    found = updates(TRACE, CATEGORIES, (2, 7, 8), **ONE)
    assert found == [WEIGHT, *MICRO_BATCH, STATE, ~GRADIENT, *MICRO_BATCH, ~GRADIENT]


def test_cache_is_emptied_in_the_first_micro_batch_only(updates):
    found = updates(TRACE, CATEGORIES, (2, 7, 8), trials=[4, 5], **ONE)
    first = [INPUT, ACTIVATION, EMPTY, GRADIENT, EMPTY, ~ACTIVATION, ~INPUT]
    assert found == [WEIGHT, *first, STATE, ~GRADIENT, *MICRO_BATCH, ~GRADIENT]


def test_updaters_take_turns_and_the_gradients_of_one_are_gone_before_the_states_of_the_next(updates):
    weight, weight2, state, total, state2, total2, gradient, gradient2 = range(8)
    categories = ["parameters", "parameters", *["optimizer", "gradients"] * 2, "", ""]
    backward = [gradient, ~gradient, gradient2, ~gradient2]
    set_up = [weight, weight2, state, total, state2, total2]
    found = updates(
        [*set_up, *backward, ~total, ~total2],
        categories,
        (6, 10, 12),
        gradients={PARAMETER: gradient, PARAMETER + 1: gradient2},
        updaters=[(state2, {PARAMETER}), (gradient, {PARAMETER + 1})],
    )
    kept = [gradient, gradient2]
    first_update = [state, ~gradient, state2, ~gradient2]
    assert found == [weight, weight2, *kept, *backward, *first_update, *kept, *backward, ~gradient, ~gradient2]


def test_weights_that_changed_their_layout_leave_their_holes_and_other_preparations_leave_none(updates):
    set_up = [ORIGINAL, TEMPORARY, ~TEMPORARY, WEIGHT, ~ORIGINAL, STATE]
    found = updates([*set_up, ACTIVATION, ~ACTIVATION], CATEGORIES, (6, 8, 8), **ONE)
    assert found[:3] == [ORIGINAL, WEIGHT, ~ORIGINAL]
    assert TEMPORARY not in found
