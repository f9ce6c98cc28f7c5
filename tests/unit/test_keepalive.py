"""The thread that looks after connections lives as long as there are any."""

from __future__ import annotations

import gc
import threading

from envhub_client.connection.keepalive import Keeper

DEADLINE_S = 10.0


class Counted:
    """Counts how often it was kept."""

    def __init__(self) -> None:
        self.times = 0
        self.kept = threading.Event()

    def keep(self) -> None:
        self.times += 1
        self.kept.set()


def test_what_is_added_is_kept_until_it_is_dropped() -> None:
    keeper, first, second = Keeper(), Counted(), Counted()
    keeper.add(first)
    assert first.kept.wait(DEADLINE_S)
    keeper.add(second)
    keeper.drop(first)
    seen = first.times
    assert second.kept.wait(DEADLINE_S)
    second.kept.clear()
    assert second.kept.wait(DEADLINE_S) and first.times <= seen + 1  # it may have been at it
    keeper.stop()


def test_thread_ends_with_the_last_thing_to_keep_and_begins_again() -> None:
    keeper, kept = Keeper(), Counted()
    for _ in range(2):
        kept.kept.clear()
        keeper.add(kept)
        thread = keeper._thread
        assert thread is not None and kept.kept.wait(DEADLINE_S)
        keeper.drop(kept)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_nothing_is_kept_alive() -> None:
    keeper, kept = Keeper(), Counted()
    keeper.add(kept)
    thread = keeper._thread
    del kept
    gc.collect()
    assert thread is not None
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_stopped_keeper_starts_no_thread() -> None:
    keeper = Keeper()
    keeper.stop()
    keeper.add(Counted())
    assert keeper._thread is None
