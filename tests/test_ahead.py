"""Reading ahead gives what reading in turn gives, each once."""

from __future__ import annotations

import threading

import pytest

from training.ahead import Ahead


def test_every_key_gets_its_own_value_also_out_of_turn():
    made = []

    def make(key: int) -> int:
        made.append(key)
        return 10 * key

    ahead = Ahead(make, lambda key: key + 1)
    assert [ahead.get(key) for key in (0, 1, 2, 7, 8)] == [0, 10, 20, 70, 80]
    assert made[:5] == [0, 1, 2, 3, 7]  # 3 was begun, and not asked for


def test_the_next_is_made_while_the_caller_works():
    begun = threading.Event()

    def make(key: int) -> int:
        if key == 1:
            begun.set()
        return key

    Ahead(make, lambda key: key + 1).get(0)
    assert begun.wait(10)


def test_an_error_is_raised_where_its_value_is_asked_for():
    def make(key: int) -> int:
        if key == 1:
            raise ValueError("row 1 is bad")
        return key

    ahead = Ahead(make, lambda key: key + 1)
    assert ahead.get(0) == 0
    with pytest.raises(ValueError, match="row 1 is bad"):
        ahead.get(1)
