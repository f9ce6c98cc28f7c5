"""Frames that are compressed arrive as they were, and claims of other sizes are refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envhub.values.codec import DecodeError
from envhub.values.compression import LEAST_BYTES, METHODS, SKIPS_MAX, Compressor, available, decompressor

methods = pytest.mark.parametrize("method", METHODS)


def test_both_libraries_are_here_for_the_tests() -> None:
    assert available() == list(METHODS)


@methods
@given(data=st.binary(max_size=50), times=st.integers(0, 500))
def test_frames_arrive_as_they_were(method: str, data: bytes, times: int) -> None:
    frame = data * times
    sent = Compressor(method).compress(frame)
    assert len(sent) <= len(frame)
    assert bytes(decompressor(method)(sent, len(frame))) == frame


@methods
def test_small_frame_is_sent_as_it_is(method: str) -> None:
    frame = bytes(LEAST_BYTES - 1)
    assert Compressor(method).compress(frame) is frame
    assert decompressor(method)(frame, len(frame)) is frame


@methods
def test_images_become_much_smaller(method: str) -> None:
    frame = np.zeros((8, 84, 84, 4), np.uint8)
    sent = Compressor(method).compress(frame)
    assert len(sent) < frame.nbytes / 50
    assert decompressor(method)(sent, frame.nbytes) == frame.tobytes()


@methods
def test_noise_is_sent_as_it_is_and_tried_ever_more_rarely(method: str) -> None:
    noise = np.random.default_rng(1).bytes(LEAST_BYTES)
    zeros = bytes(LEAST_BYTES)
    compressor = Compressor(method)
    assert compressor.compress(noise) is noise
    assert compressor.compress(zeros) is zeros  # one is left out
    assert len(compressor.compress(zeros)) < LEAST_BYTES
    for _ in range(300):
        compressor.compress(noise)
    waits = next(count for count in range(2 * SKIPS_MAX) if len(compressor.compress(zeros)) < LEAST_BYTES)
    assert 0 < waits <= SKIPS_MAX


@methods
@pytest.mark.parametrize("wrong", [b"", b"nonsense", bytes(100)])
def test_nonsense_is_refused(method: str, wrong: bytes) -> None:
    with pytest.raises(DecodeError):
        decompressor(method)(wrong, 5000)


@methods
@pytest.mark.parametrize("due", [LEAST_BYTES - 1, LEAST_BYTES + 1, 10 * LEAST_BYTES, 1])
def test_frames_of_another_size_than_is_due_are_refused(method: str, due: int) -> None:
    sent = Compressor(method).compress(bytes(LEAST_BYTES))
    with pytest.raises(DecodeError):
        decompressor(method)(sent, due)


@methods
@pytest.mark.parametrize("behind", [b"\0", b"nonsense", None])
def test_frame_with_more_behind_it_is_refused(method: str, behind: bytes | None) -> None:
    sent = Compressor(method).compress(bytes(LEAST_BYTES))
    with pytest.raises(DecodeError):
        decompressor(method)(sent + (sent if behind is None else behind), LEAST_BYTES)


@methods
def test_frame_whose_saving_takes_too_long_is_sent_and_the_next_one_left_out(method: str) -> None:
    zeros, clock_ns = bytes(LEAST_BYTES), itertools.count(0, 10 * LEAST_BYTES)
    slow = Compressor(method, byte_ns=9.0, clock_ns=clock_ns.__next__)
    assert [len(slow.compress(zeros)) < LEAST_BYTES for _ in range(5)] == [True, False, True, False, False]
    quick = Compressor(method, byte_ns=11.0, clock_ns=clock_ns.__next__)
    assert all(len(quick.compress(zeros)) < LEAST_BYTES for _ in range(5))


@pytest.mark.parametrize("due", [100, 5000])
def test_size_that_a_sender_claims_is_never_allocated(due: int) -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor(write_content_size=due != 100).compress(bytes(1 << 16))
    claim = bomb[:5] + due.to_bytes(4, "little") + bomb[9:] if due != 100 else bomb
    with pytest.raises(DecodeError):
        decompressor("zstd")(claim, due)
