"""A thread gets the next item while the current one is used."""

from __future__ import annotations

import threading

import pytest

from data.workers import one_ahead
from settings import DataError


def test_items_come_in_order_and_the_next_is_made_during_the_current():
    made = [threading.Event() for _ in range(4)]

    def numbers():
        for number, event in enumerate(made):
            event.set()
            yield number

    items = one_ahead(numbers())
    assert not made[0].is_set()
    for number in range(4):
        assert next(items) == number
        assert number == 3 or made[number + 1].wait(timeout=60)
    assert next(items, "end") == "end"


def test_error_arrives_where_the_item_would_have():
    def numbers():
        yield 1
        raise DataError("scan.nii: it is gone")

    items = one_ahead(numbers())
    assert next(items) == 1
    with pytest.raises(DataError, match="it is gone"):
        next(items)


def test_stopping_early_ends_the_thread():
    before = threading.active_count()
    items = one_ahead(iter(range(9)))
    next(items)
    items.close()
    assert threading.active_count() == before


def test_items_are_let_go_by_the_thread_and_not_by_the_caller():
    freed: list[tuple[int, str]] = []

    class Batch:
        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            freed.append((self.number, threading.current_thread().name))

    for number, batch in enumerate(one_ahead(map(Batch, range(8)))):
        assert batch.number == number
        assert [done for done, _ in freed] == list(range(len(freed)))
        assert number - 3 <= len(freed) <= number
    assert [name.startswith("data") for _, name in freed[:6]] == [True] * 6
