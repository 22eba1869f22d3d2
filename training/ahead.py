"""The next batch is read, and pinned for an accelerator, by a thread while the ranks compute."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Ahead(Generic[Key, Value]):
    """`make(key)` of the key that is asked for; that of the key after it is begun at once.

    Args:
        make: called in a thread of this object's own, one at a time.
        following: the key that is likely to be asked for next.
    """

    def __init__(self, make: Callable[[Key], Value], following: Callable[[Key], Key]):
        self._make, self._following = make, following
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="next batch")
        self._begun: tuple[Key, Future[Value]] | None = None

    def get(self, key: Key) -> Value:
        """Raises what `make` raises."""
        if self._begun is None or self._begun[0] != key:  # the first, or a run that goes on elsewhere
            self._begin(key)
        value = self._begun[1].result()
        self._begin(self._following(key))
        return value

    def _begin(self, key: Key) -> None:
        self._begun = key, self._pool.submit(self._make, key)
