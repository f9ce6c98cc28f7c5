"""Rings that one holder of an eventfd keeps waiting hold up nobody, and none is lost."""

from __future__ import annotations

import os
import select

from envhub_server.loop import Ringer

FULL = (2**64 - 2).to_bytes(8, "little")
DEADLINE_S = 10.0


def test_ring_of_a_full_bell_waits_for_its_holder_alone() -> None:
    bell, other = os.eventfd(0, 0), os.eventfd(0, 0)
    os.write(bell, FULL)
    ringer = Ringer()
    ringer.ring(bell)
    ringer.ring(bell)
    Ringer().ring(other)
    assert select.select([other], [], [], DEADLINE_S)[0] and os.read(other, 8)
    assert os.read(bell, 8)
    assert select.select([bell], [], [], DEADLINE_S)[0] and os.read(bell, 8)
    os.close(bell)
    os.close(other)


def test_every_ring_is_heard() -> None:
    bell, ringer = os.eventfd(0, os.EFD_NONBLOCK), Ringer()
    for _ in range(100):
        ringer.ring(bell)
        assert select.select([bell], [], [], DEADLINE_S)[0] and os.read(bell, 8)
    os.close(bell)
