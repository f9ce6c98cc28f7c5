"""The fence of two processes that each store a word and load the other's."""

from __future__ import annotations

import itertools
import mmap
import os
import time

import pytest

from envhub.arena.spin import HAS_FENCE, fence

TRIED_S = 40.0
LOOKS = 100  # without success, before a process leaves its CPU to others: the one it waits for may need it
# Words stored just before, each in a page that no cache has: the word waits behind them in the CPU's store queue.
SLOW_STORES = 48
PAGE_WORDS = 520  # and one cache line more
SLOW_BYTES = 128 << 20


def missed(rounds: int, fenced: bool) -> int:
    """Count the rounds in which two processes each store a word, then load the other's, and neither sees it.

    Without the fence nothing is between the store and the load: the call of any function makes more stores than the
    queue of many CPUs holds.
    """
    with mmap.mmap(-1, 4096) as shared:
        words = memoryview(shared).cast("q")
        # Each word in a cache line of its own: where each stands, what it stores, and whether it saw the other's.
        places = [[words[8 * place : 8 * place + 1] for place in range(3 * side, 3 * side + 3)] for side in (0, 1)]
        child = os.fork()
        own, other = places if child else reversed(places)
        (own_round, own_word, own_saw), (other_round, other_word, other_saw) = own, other
        found, begin, step = 0, 0, SLOW_STORES * PAGE_WORDS
        slow, zeros = memoryview(bytearray(SLOW_BYTES)).cast("q"), memoryview(bytes(8 * SLOW_STORES)).cast("q")
        for number in range(1, rounds + 1):
            begin = begin + step if begin + 2 * step <= len(slow) else 0
            stores = slow[begin : begin + step : PAGE_WORDS]
            own_round[0] = number
            for looks in itertools.count(1):
                if other_round[0] >= number:
                    break
                if looks % LOOKS == 0:
                    os.sched_yield()
            stores[:] = zeros
            own_word[0] = number
            if fenced:
                fence()
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
    rounds, tries, begun_s = 5_000, 1, time.monotonic()
    while not missed(rounds, fenced=False):
        tries += 1
        if time.monotonic() - begun_s > TRIED_S:
            pytest.skip("without a fence both see the other's word, too: the two hardly ran at the same time")
    assert missed(max(20_000, tries * rounds), fenced=True) == 0
