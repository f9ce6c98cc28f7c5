"""The fence of two processes that each store a word and load the other's."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable

import pytest

from envhub.arena.spin import HAS_FENCE, fence

TRIED_S = 40.0
LOOKS = 100  # in vain, before a process leaves its CPU to others, of which the one it waits for may be one


def missed(rounds: int, between: Callable[[], None]) -> int:
    """How often of two processes, that each store a word and then load the other's, neither sees the other's."""
    with mmap.mmap(-1, 4096) as shared:
        words = memoryview(shared).cast("q")
        # Each word in a cache line of its own: where each stands, what it stores, and whether it saw the other's.
        places = [[words[8 * place : 8 * place + 1] for place in range(3 * side, 3 * side + 3)] for side in (0, 1)]
        child = os.fork()
        own, other = places if child else reversed(places)
        (own_round, own_word, own_saw), (other_round, other_word, other_saw) = own, other
        found = 0
        for number in range(1, rounds + 1):
            own_round[0] = number
            for looks in itertools.count(1):
                if other_round[0] >= number:
                    break
                if looks % LOOKS == 0:
                    os.sched_yield()
            own_word[0] = number
            between()
            saw = other_word[0] == number
            own_saw[0] = 2 * number + saw
            for looks in itertools.count(1):
                if other_saw[0] >> 1 >= number:
                    break
                if looks % LOOKS == 0:
                    os.sched_yield()
            found += not saw and not other_saw[0] & 1
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        for word in (own_round, own_word, own_saw, other_round, other_word, other_saw, words):
            word.release()
        return found


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_FENCE, reason="this machine has no fence that Python can reach")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes have to run at the same time")
def test_fence_has_at_least_one_of_two_see_what_the_other_stored() -> None:
    rounds, tries, begun_s = 5_000, 0, time.monotonic()
    while not missed(rounds, lambda: None):
        tries += 1
        if tries == 80 or time.monotonic() - begun_s > TRIED_S:
            pytest.skip("without a fence nothing was missed, either: the two hardly ran at the same time")
    assert missed(max(20_000, (1 + tries) * rounds), fence) == 0
