"""What two updates of a run allocate, in order, made of one tracked step.

Where blocks lie decides how well later ones fit, so reserved memory depends on what a run did before. At the first call
of each convolution cuDNN tries its algorithms, if asked to, and torch then empties its cache.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from memory.predict.allocator import AllocatorLimits, CachingAllocator, replay
from memory.predict.records import StepEvents
from memory.predict.tracker import MemoryTracker

_LATER = ("optimizer", "gradients")
"""What a tracked step begins with, but a run does not."""


def replay_training(
    tracker: MemoryTracker, limits: AllocatorLimits, left_out: tuple[str, ...] = ()
) -> CachingAllocator:
    """Run two updates of a tracked step through the allocator; categories in `left_out` take no memory."""
    assert tracker.step is not None, "only a tracker of a whole step knows where it is in the trace"
    records = tracker.allocations
    categories = [record.category for record in records]
    trace, sources, emptied = training_trace(
        tracker.trace, categories, tracker.step, tracker.incoming, tracker.kept, tracker.benchmarked, _owned(tracker)
    )
    sizes = [0 if r.place == "host" or r.category in left_out else r.nbytes for r in (records[i] for i in sources)]
    return replay(trace, sizes, limits, emptied)


def _owned(tracker: MemoryTracker) -> list[set[int]]:
    """Return what each updater owns: its states and its gradients."""
    owned, start = [], 0
    for end, parameters in tracker.updaters:
        incoming = {index for parameter, index in tracker.first_gradients.items() if parameter in parameters}
        owned.append({*range(start, end), *incoming})
        start = end
    return owned


def training_trace(
    trace: Sequence[int],
    categories: Sequence[str],
    step: StepEvents,
    incoming: set[int],
    kept: set[int],
    emptied: Sequence[int] = (),
    updaters: Sequence[Container[int]] = (),
) -> tuple[list[int], list[int], set[int]]:
    """Return the trace of two updates, made of one step that began with optimizer states, and what it allocates.

    Where blocks lie decides how well later ones fit. In a real run libraries take their memory, and the first
    micro-batch its gradients, between activations, and optimizer states come after the first backward pass. Updaters
    take turns: the states of each come when the gradients of the one before are gone.

    incoming: gradients as backward hands them to parameters. kept: what libraries take once. emptied: before which
    events the first micro-batch empties the cache. updaters: the states and gradients of each; without, one has all.
    The second list says of which allocation each is a copy, the third value before which events the cache is emptied.
    """
    copies = _Copies(kept)
    before = [event for event in trace[: step.start] if event >= 0]
    released = {~event for event in trace[: step.start] if event < 0}
    update = trace[step.update : step.end]
    is_accumulating = any(categories[index] == "gradients" and index not in released for index in before)
    for event in trace[: step.start]:
        index = max(event, ~event)
        if categories[index] == "parameters" or (index not in released and categories[index] not in _LATER):
            copies.allocate(index) if event >= 0 else copies.release(index)
    backward = trace[step.start : step.update]
    for number in range(2):
        emptying = {event - step.start for event in emptied} if not number else set()
        if is_accumulating:
            copies.run(backward, incoming, emptying)
            copies.forget(incoming)
        copies.run(backward, set(), set() if is_accumulating else emptying)
        done = 0
        for owned in updaters or (range(len(categories)),):
            for index in before if not number else ():
                if categories[index] == "optimizer" and index in owned:
                    copies.allocate(index)
            end = max((i + 1 for i, event in enumerate(update) if event < 0 and ~event in owned), default=done)
            copies.run(update[done:end], set())
            copies.release_gradients(owned)
            done = end
        copies.run(update[done:], set())
        copies.end_update()
    return copies.trace, copies.sources, copies.emptied


class _Copies:
    """A trace that repeats another one; each repetition allocates anew."""

    def __init__(self, kept: set[int]) -> None:
        self.kept = kept
        self.trace: list[int] = []
        self.sources: list[int] = []
        self.emptied: set[int] = set()
        self._live: dict[int, int] = {}
        self._gradients: list[int] = []
        self._of_update: set[int] = set()

    def allocate(self, index: int) -> None:
        self._live[index] = len(self.sources)
        self.trace.append(len(self.sources))
        self.sources.append(index)

    def release(self, index: int) -> None:
        self.trace.append(~self._live.pop(index))

    def run(self, events: Sequence[int], kept: set[int], emptying: Container[int] = ()) -> None:
        """Repeat events; do not release allocations in `kept`, and empty the cache before events in `emptying`."""
        for position, event in enumerate(events):
            if position in emptying:
                self.emptied.add(len(self.trace))
            if event < 0:
                if ~event not in kept and ~event in self._live and ~event not in self.kept:
                    self.release(~event)
                    self._of_update.discard(~event)
            elif event not in self._live or event not in self.kept:
                self.allocate(event)
                if event not in self.kept:
                    self._of_update.add(event)

    def forget(self, gradients: set[int]) -> None:
        """End a micro-batch: the gradients stay until the update is over, everything else of it is released."""
        for index in list(self._of_update):
            copy = self._live.pop(index)
            if index in gradients:
                self._gradients.append(copy)
            else:
                self.trace.append(~copy)
        self._of_update.clear()

    def release_gradients(self, owned: Container[int]) -> None:
        """Release those gradients of earlier micro-batches that an updater owns."""
        self.trace += [~copy for copy in self._gradients if self.sources[copy] in owned]
        self._gradients = [copy for copy in self._gradients if self.sources[copy] not in owned]

    def end_update(self) -> None:
        """Release the gradients and whatever else the update left."""
        self.forget(set())
        self.trace += [~copy for copy in self._gradients]
        self._gradients.clear()
