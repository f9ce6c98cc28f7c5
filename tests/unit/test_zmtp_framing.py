"""How much of a client's bytes a proxy lets pass, whatever their pieces are."""

from __future__ import annotations

import random

import pytest
from envhub_server.network.zmtp_framing import (
    BYTES,
    CURVE_BYTES,
    FOREIGN,
    FORGIVEN_MAX,
    FRAMES,
    GREETING_BYTES,
    HANDSHAKE,
    HANDSHAKE_BYTES_MAX,
    ClientFrames,
    HubFrames,
)
from zmtp import command, frame

GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00").ljust(GREETING_BYTES, b"\0")
READY = command(b"READY", b"")
PING, PONG = command(b"PING", bytes(2)), command(b"PONG", b"")
FRAMES_MAX, BYTES_MAX = 8, 1000
EMPTY = b"\x01\x00"


def admitted(frames: ClientFrames, data: bytes) -> bytes:
    """What passes of these bytes, which come at one time."""
    return data[: frames.admit(memoryview(data))]


def begun(curve: bool = False, frames_max: int = FRAMES_MAX, bytes_max: int = BYTES_MAX) -> ClientFrames:
    """A client that the hub has let in."""
    frames = ClientFrames(frames_max, bytes_max, curve)
    assert admitted(frames, GREETING + READY) == GREETING + READY
    frames.ready()
    return frames


def encrypted(body: bytes) -> bytes:
    """A frame as CURVE makes it."""
    return bytes([0, CURVE_BYTES + len(body)]) + bytes(CURVE_BYTES) + body


@pytest.mark.parametrize("seed", range(20))
def test_all_that_is_within_the_limits_passes_in_whichever_pieces_it_comes(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.randrange(400) for _ in range(100)]
    bodies = [frame(bytes(size), True) if size > 200 else bytes([1, size]) + bytes(size) for size in sizes]
    message = b"".join(bodies)
    passed, held, frames = b"", b"", ClientFrames(200, 1 << 20, curve=False)
    for data in (GREETING + READY, message):
        while data or held:
            size = generator.randrange(1, 50)
            held, data = held + data[:size], data[size:]
            count = frames.admit(memoryview(held))
            passed, held = passed + held[:count], held[count:]
            assert not frames.full
        frames.ready()
    assert passed == GREETING + READY + message and not frames.left
    assert (frames.unread_frames, frames.unread_bytes) == (len(bodies), sum(sizes))


def test_frame_beyond_the_limit_does_not_pass_until_others_are_read() -> None:
    frames = begun()
    assert admitted(frames, EMPTY * 100) == EMPTY * FRAMES_MAX and frames.full == FRAMES and frames.partial
    frames.read(3, 0)
    assert not frames.full and admitted(frames, EMPTY * 90) == EMPTY * 3 and frames.full == FRAMES
    frames.read(3 + FRAMES_MAX, 0)
    assert not frames.partial and frames.unread_frames == 0


def test_bytes_beyond_the_limit_do_not_pass_though_their_frame_has_not_come() -> None:
    frames = begun()
    large, other = frame(bytes(900), True), frame(bytes(101), False)
    assert admitted(frames, large[:50]) == large[:50] and frames.partial and frames.unread_bytes == 900
    assert admitted(frames, large[50:] + other) == large[50:] and frames.full == BYTES
    frames.read(1, 900)
    assert admitted(frames, other) == other and frames.unread_bytes == 101
    assert admitted(begun(), frame(bytes(1001), False)) == b""


def test_body_of_a_large_frame_is_not_taken_for_frames() -> None:
    frames = begun()
    admitted(frames, frame(EMPTY * 400, True))
    assert frames.unread_frames == 1 and not frames.left and not frames.full


@pytest.mark.parametrize("curve", [False, True])
def test_answered_heartbeats_count_for_nothing(curve: bool) -> None:
    frames, ping = begun(curve), encrypted(b"\x04PING" + bytes(2)) if curve else PING
    for _ in range(100):
        assert admitted(frames, ping) == ping and not frames.partial
        frames.answered(1)
    assert admitted(frames, ping * 100) == ping * FRAMES_MAX and frames.full == FRAMES


def test_heartbeats_without_an_answer_are_forgotten_when_a_message_is_read() -> None:
    frames, ping = begun(curve=True), encrypted(bytes(7))
    message = encrypted(bytes(60))
    assert FORGIVEN_MAX > FRAMES_MAX
    for read in range(1, 10):
        assert admitted(frames, ping * 5 + message) == ping * 5 + message and frames.partial
        frames.read(read, 60 * read)
        assert not frames.partial and frames.unread_bytes == 0


def test_answers_that_none_asked_for_let_nothing_pass() -> None:
    frames = begun(curve=True)
    admitted(frames, encrypted(bytes(60)) * FRAMES_MAX)
    frames.answered(1000)
    assert (frames.unread_frames, frames.unread_bytes) == (FRAMES_MAX, 60 * FRAMES_MAX)
    assert admitted(frames, encrypted(b"")) == b""


def test_frame_passes_as_soon_as_its_size_is_known() -> None:
    frames = begun()
    assert admitted(frames, b"") == b"" and admitted(frames, EMPTY[:1]) == b""
    assert admitted(frames, EMPTY) == EMPTY and frames.full == ""
    assert ClientFrames(FRAMES_MAX, BYTES_MAX, curve=False).admit(memoryview(b"")) == 0


def test_frame_of_any_size_that_can_be_written_is_measured() -> None:
    for bit in range(10, 64):
        frames = begun()
        assert admitted(frames, bytes([2]) + (1 << bit).to_bytes(8, "big")) == b"" and frames.full == BYTES


def test_as_many_bytes_as_may_be_unread_pass() -> None:
    frames, whole = begun(), frame(bytes(BYTES_MAX), True)
    assert admitted(frames, whole + EMPTY + frame(b"1", False)) == whole + EMPTY and frames.full == BYTES


def test_heartbeat_is_partial_until_its_last_byte_has_passed() -> None:
    frames = begun()
    assert admitted(frames, PING[:2]) == PING[:2] and frames.partial
    assert admitted(frames, PING[2:-1]) == PING[2:-1] and frames.partial
    assert admitted(frames, PING[-1:]) == PING[-1:] and not frames.partial


def test_messages_that_are_read_one_after_another_leave_what_is_unread() -> None:
    frames = begun()
    assert len(admitted(frames, b"".join(bytes([1, size]) + bytes(size) for size in (100, 90, 80, 70, 0)))) == 350
    for read, (nbytes, left) in enumerate([(100, 240), (190, 150), (270, 70), (340, 0)], 1):
        frames.read(read, nbytes)
        assert (frames.unread_frames, frames.unread_bytes) == (5 - read, left)
        frames.read(read, nbytes)
        assert (frames.unread_frames, frames.unread_bytes, frames.partial) == (5 - read, left, True)
    frames.read(5, 340)
    assert (frames.unread_frames, frames.unread_bytes, frames.partial) == (0, 0, False)


def test_message_of_the_size_of_a_heartbeat_is_none_where_its_frame_says_so() -> None:
    frames = begun()
    admitted(frames, bytes([0, 10]) + bytes(10))
    frames.answered(1)
    assert frames.partial and frames.unread_frames == 1


def test_answer_is_for_one_heartbeat() -> None:
    frames = begun()
    admitted(frames, PING * 3)
    frames.answered(1)
    assert frames.unread_frames == 2 and not frames.partial
    admitted(frames, EMPTY)
    assert frames.unread_frames == 3 and frames.partial


def test_message_that_is_read_has_few_heartbeats_forgiven_and_only_once() -> None:
    frames = begun(True, 1000, 1 << 20)
    admitted(frames, encrypted(bytes(60)) + encrypted(bytes(5)) * (FORGIVEN_MAX + 100))
    for _ in range(3):
        frames.read(1, 60)
        assert frames.unread_frames == 100 and not frames.partial


def test_short_messages_that_were_taken_for_heartbeats_hide_none_that_come_later() -> None:
    frames, count = begun(True, 1000, 1 << 20), FORGIVEN_MAX * 2
    admitted(frames, encrypted(bytes(5)) * count)
    frames.read(count, 5 * count)
    assert frames.unread_frames == 0 and not frames.partial
    admitted(frames, encrypted(bytes(60)))
    assert frames.unread_frames == 1 and frames.partial


def test_short_messages_that_were_forgiven_make_no_room_once_they_are_read() -> None:
    frames = begun(curve=True)
    admitted(frames, encrypted(bytes(60)) + encrypted(bytes(10)) * 5)
    frames.read(1, 60)
    assert frames.unread_frames == 0
    frames.read(4, 90)
    assert (frames.unread_frames, frames.unread_bytes) == (0, 0)
    admitted(frames, encrypted(b"1") * 2)
    frames.read(5, 100)
    assert (frames.unread_frames, frames.unread_bytes) == (1, 0)


def test_frame_too_short_for_curve_makes_no_room() -> None:
    frames = begun(curve=True)
    admitted(frames, EMPTY * 3)
    assert (frames.unread_frames, frames.unread_bytes) == (3, 0)


def test_client_that_is_not_let_in_has_little_to_say() -> None:
    frames = ClientFrames(FRAMES_MAX, BYTES_MAX, curve=True)
    hello = frame(bytes(HANDSHAKE_BYTES_MAX - 100), False)
    assert admitted(frames, GREETING + hello + hello) == GREETING + hello and frames.full == HANDSHAKE
    frames.ready()
    assert not frames.full


@pytest.mark.parametrize("said", [EMPTY, frame(b"", True), frame(bytes(55), False)], ids=["empty", "long", "other"])
def test_client_that_is_not_let_in_sends_no_more_bytes_than_a_handshake_has(said: bytes) -> None:
    frames = ClientFrames(FRAMES_MAX, BYTES_MAX, curve=False)
    assert admitted(frames, GREETING) == GREETING and frames.full == ""
    assert admitted(frames, said) == said and frames.full == ""
    passed = len(said + admitted(frames, said * HANDSHAKE_BYTES_MAX))
    assert HANDSHAKE_BYTES_MAX - len(said) < passed <= HANDSHAKE_BYTES_MAX and frames.full == HANDSHAKE


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x01\x00",
        b"\xff" + bytes(8) + b"\x7e",
        b"\xff" + bytes(8) + b"\x7e\x03",
        b"\x01" + GREETING[1:11],
        GREETING[:10] + b"\x02",
    ],
    ids=repr,
)
def test_peer_of_another_protocol_says_no_more_than_a_greeting(said: bytes) -> None:
    for pieces in ([said + bytes(1000)], [bytes([byte]) for byte in said + bytes(1000)]):
        frames = ClientFrames(FRAMES_MAX, BYTES_MAX, curve=False)
        passed = b"".join(admitted(frames, piece) for piece in pieces)
        assert len(passed) <= GREETING_BYTES and frames.full == FOREIGN
        assert admitted(frames, EMPTY) == b""


@pytest.mark.parametrize("curve", [False, True])
def test_nonsense_passes_up_to_the_limits(curve: bool) -> None:
    generator = random.Random(4)
    for _ in range(300):
        frames, held = begun(curve), b""
        for _ in range(20):
            held += generator.randbytes(generator.randrange(300))
            count = frames.admit(memoryview(held))
            assert 0 <= count <= len(held)
            held = held[count:]
            assert frames.unread_frames <= FRAMES_MAX and frames.unread_bytes <= BYTES_MAX
            assert frames.full or len(held) < 9


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_hub_says_who_is_let_in_and_which_heartbeats_it_has_answered(piece: int) -> None:
    for curve, pong in ((False, PONG), (True, encrypted(b"\x04PONG"))):
        hub = HubFrames(curve)
        said = GREETING + READY + pong + frame(bytes(3000), True) + frame(PONG * 9, False) + encrypted(bytes(40)) + pong
        pongs = sum(hub.scan(memoryview(said[at : at + piece])) for at in range(0, len(said), piece))
        assert pongs == 2 and hub.ready and not hub.denied
    denied = HubFrames(curve=True)
    said = GREETING + command(b"WELCOME", bytes(100)) + command(b"ERROR", b"\x03400")
    assert sum(denied.scan(memoryview(said[at : at + piece])) for at in range(0, len(said), piece)) == 0
    assert denied.welcomed and denied.denied and not denied.ready


@pytest.mark.parametrize("piece", [1, 1000])
def test_message_of_the_hub_is_no_answer_to_a_heartbeat(piece: int) -> None:
    hub = HubFrames(curve=False)
    said = GREETING + READY + bytes([0, 7]) + bytes(7) + frame(bytes(300), True) + PONG + frame(b"", False) + PONG
    assert sum(hub.scan(memoryview(said[at : at + piece])) for at in range(0, len(said), piece)) == 2


def test_message_of_the_hub_lets_nobody_in() -> None:
    hub = HubFrames(curve=False)
    hub.scan(memoryview(GREETING + bytes([0]) + READY[1:]))
    assert not hub.ready
    hub.scan(memoryview(READY))
    assert hub.ready


def test_client_that_was_told_that_it_is_not_let_in_stays_denied() -> None:
    hub = HubFrames(curve=True)
    hub.scan(memoryview(GREETING + command(b"ERROR", b"\x03400") + command(b"WELCOME", bytes(100))))
    assert hub.denied and not hub.ready
