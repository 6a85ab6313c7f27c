"""The trace of two updates, made of one tracked step."""

from memory.predict.history import training_trace
from memory.predict.records import StepEvents

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
