"""The replayed allocator follows CUDA's rules, and the trace of two updates is made of one tracked step."""

import random

import pytest

from memory.predict.allocator import AllocatorLimits, CachingAllocator, replay, replay_pinned, training_trace
from memory.predict.prediction import MIB
from memory.predict.tracker import StepEvents


@pytest.mark.parametrize(
    ("request_mib", "reserved_mib"), [(1.5, 20), (9.9, 20), (10, 10), (11, 12), (100, 100), (100.5, 102)]
)
def test_large_requests_get_segments_by_their_size_and_small_ones_share_one(request_mib, reserved_mib):
    small, large = [1, 513, MIB], [int(request_mib * MIB)]
    allocators = [replay(range(len(sizes)), sizes, AllocatorLimits()) for sizes in (small, large)]
    assert allocators[0].peak_allocated == 512 + 1024 + MIB
    assert [allocator.peak_reserved for allocator in allocators] == [2 * MIB, reserved_mib * MIB]


def test_released_block_is_reused_and_best_fit_wins():
    sizes = [64 * MIB, 32 * MIB, 30 * MIB]
    allocator = replay([0, 1, ~0, ~1, 2], sizes, AllocatorLimits())
    assert allocator.peak_reserved == 96 * MIB
    # The remainder of the 32 MiB block stays usable, the 64 MiB block is untouched.
    allocator.allocate(64 * MIB)
    assert allocator.reserved == 96 * MIB


def test_remainder_up_to_one_mebibyte_is_not_split_off():
    allocator = replay([0, ~0, 1], [32 * MIB, 31 * MIB], AllocatorLimits())
    assert allocator.allocated == 32 * MIB


def test_fragments_of_two_segments_cannot_hold_what_one_expandable_segment_can():
    sizes = [64 * MIB, 64 * MIB, 128 * MIB]
    trace = [0, 1, ~0, ~1, 2]
    assert replay(trace, sizes, AllocatorLimits()).peak_reserved == 256 * MIB
    # 7 pieces of 20 MiB hold the first two, and grow for the third.
    assert replay(trace, sizes, AllocatorLimits(expandable_segments=True)).peak_reserved == 140 * MIB


def test_neighbours_merge_in_any_order_of_release():
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]):
        allocator = CachingAllocator(AllocatorLimits(expandable_segments=True))
        blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
        for index in order:
            allocator.release(blocks[index], 20 * MIB)
        allocator.allocate(60 * MIB)
        assert allocator.reserved == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_random_trace_keeps_its_totals_consistent(expandable):
    rng = random.Random(0)
    allocator = CachingAllocator(AllocatorLimits(expandable))
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


def test_a_limit_on_splitting_keeps_large_blocks_from_small_requests():
    limits = AllocatorLimits.parse("max_split_size_mb:128")
    trace, sizes = [0, ~0, 1], [200 * MIB, 50 * MIB]
    assert replay(trace, sizes, limits).peak_reserved == 250 * MIB
    assert replay(trace, sizes, AllocatorLimits()).peak_reserved == 200 * MIB
    # A large request takes a large block only if hardly anything of it is wasted.
    assert replay(trace, [200 * MIB, 150 * MIB], limits).peak_reserved == 350 * MIB
    assert replay(trace, [200 * MIB, 190 * MIB], limits).peak_reserved == 200 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last():
    """It counts as all that the segment can still become, so a larger block inside the segment fits better."""
    sizes = [60 * MIB, 20 * MIB, 40 * MIB, 40 * MIB, 50 * MIB]
    limits = AllocatorLimits(expandable_segments=True)
    # Block 0 (60 MiB) and the end (40 MiB) are free: 40 MiB go into block 0, so 50 MiB grow the end by 20.
    assert replay([0, 1, 2, ~0, ~2, 3, 4], sizes, limits).peak_reserved == 140 * MIB


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


def test_emptying_the_cache_gives_whole_pages_back_and_holes_are_mapped_again():
    allocator = CachingAllocator(AllocatorLimits(expandable_segments=True))
    first, second, third = (allocator.allocate(60 * MIB) for _ in range(3))
    allocator.release(second, 60 * MIB)
    allocator.empty_cache()
    assert allocator.reserved == 120 * MIB
    assert allocator.allocate(30 * MIB) is not None
    assert allocator.reserved == 160 * MIB  # two pages of the hole
    allocator.release(first, 60 * MIB)
    allocator.release(third, 60 * MIB)
    assert allocator.peak_reserved == 180 * MIB


def test_what_is_unmapped_at_the_end_of_a_segment_joins_what_was_never_mapped():
    allocator = CachingAllocator(AllocatorLimits(expandable_segments=True))
    first, last = (allocator.allocate(size * MIB) for size in (40, 30))
    allocator.release(last, 30 * MIB)
    allocator.allocate(8 * MIB)
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB
    allocator.release(first, 40 * MIB)
    # The 12 MiB before the end can grow without limit, so the 40 MiB count as the better fit and are split.
    allocator.allocate(10 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 100 * MIB


def test_holes_side_by_side_are_one():
    allocator = CachingAllocator(AllocatorLimits(expandable_segments=True))
    _, first, second, other, _ = [allocator.allocate(size * MIB) for size in (30, 30, 40, 40, 20)]
    for block, size in ((first, 30), (second, 40)):
        allocator.release(block, size * MIB)
        allocator.empty_cache()
    allocator.release(other, 40 * MIB)
    assert allocator.reserved == 100 * MIB
    # The 10 MiB below the holes count as 70 with both of them, so the free 40 MiB fit better and are split.
    allocator.allocate(6 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 140 * MIB


def test_of_equal_free_blocks_the_one_in_the_oldest_segment_is_taken():
    allocator = CachingAllocator(AllocatorLimits())
    oldest, newest = (allocator.allocate(size * MIB) for size in (64, 32))
    allocator.release(oldest, 64 * MIB)
    allocator.allocate(32 * MIB)
    allocator.release(newest, 32 * MIB)
    # The other half of the oldest segment, although that block is the youngest.
    allocator.allocate(32 * MIB)
    allocator.empty_cache()
    assert allocator.reserved == 64 * MIB


def test_emptying_the_cache_of_the_default_allocator_frees_unused_segments():
    allocator = replay([0, 1, ~1], [12 * MIB, 24 * MIB], AllocatorLimits())
    allocator.empty_cache()
    assert allocator.reserved == 12 * MIB


WEIGHT, INPUT, STATE, ACTIVATION, INCOMING = range(5)
CATEGORIES = ["parameters", "inputs", "optimizer", "", "gradients"]
# The step begins at the third event and updates after the seventh.
TRACE = [WEIGHT, STATE, INPUT, ACTIVATION, INCOMING, ~ACTIVATION, ~INPUT, ~INCOMING]
STEP = StepEvents(2, 7, 8)


def names(trace, sources):
    return [sources[event] if event >= 0 else ~sources[~event] for event in trace]


def test_each_micro_batch_brings_its_input_and_optimizer_states_come_after_the_first_backward():
    trace, sources, emptied = training_trace(TRACE, CATEGORIES, STEP, {INCOMING}, set())
    micro_batch = [INPUT, ACTIVATION, INCOMING, ~ACTIVATION, ~INPUT]
    assert names(trace, sources) == [WEIGHT, *micro_batch, STATE, ~INCOMING, *micro_batch, ~INCOMING]
    assert not emptied
    assert all(trace.count(~event) <= 1 for event in range(len(sources)))


def test_updaters_take_turns_and_the_gradients_of_one_are_gone_before_the_states_of_the_next():
    weight, state, total, gradient, weight2, state2, total2, gradient2 = range(8)
    categories = ["parameters", "optimizer", "gradients", ""] * 2
    before = [weight, weight2, state, total, state2, total2]
    backward = [gradient, ~gradient, gradient2, ~gradient2]
    owned = [{state, total, gradient}, {state2, total2, gradient2}]
    found, sources, _ = training_trace(
        [*before, *backward, ~total, ~total2],
        categories,
        StepEvents(6, 10, 12),
        {gradient, gradient2},
        set(),
        updaters=owned,
    )
    kept = [gradient, gradient2]
    first_update = [state, ~gradient, state2, ~gradient2]
    later = [*kept, *backward, ~gradient, ~gradient2]
    assert names(found, sources) == [weight, weight2, *kept, *backward, *first_update, *later]


def test_cache_is_emptied_in_the_first_micro_batch_only():
    trace, sources, emptied = training_trace(TRACE, CATEGORIES, STEP, {INCOMING}, set(), emptied=[4, 5])
    assert [names(trace, sources)[position] for position in sorted(emptied)] == [INCOMING, ~ACTIVATION]
    assert max(emptied) < names(trace, sources).index(STATE)


def test_weights_that_changed_their_layout_leave_their_holes_and_other_preparations_leave_none():
    original, temporary = 5, 6
    before = [original, temporary, ~temporary, WEIGHT, ~original, STATE]
    trace = [*before, ACTIVATION, ~ACTIVATION]
    found, sources, _ = training_trace(trace, [*CATEGORIES, "parameters", ""], StepEvents(6, 8, 8), set(), set())
    assert names(found, sources)[:3] == [original, WEIGHT, ~original]
    assert temporary not in sources
