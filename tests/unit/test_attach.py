"""What comes through a hub's side socket, if the hub sends what it likes."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from envhub_client.connection.local_sockets import NOWHERE, LocalSockets
from envhub_client.lanes import attach
from envhub_client.lanes.attach import Attachment
from zmq.utils.monitor import recv_monitor_message

from envhub.arena.spin import RING
from envhub.errors import AddressError
from envhub.protocol import messages
from envhub.protocol.messages import Shared
from envhub.transport import sockets
from envhub.transport.address import HubKeys, parse, side_path

Serve = Callable[[Callable[[socket.socket, threading.Event], None]], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Answers the next ticket, in a thread that is told to end; returns the hub's address."""
    ended, threads = threading.Event(), []
    with socket.socket(socket.AF_UNIX) as listener:

        def begin(answer: Callable[[socket.socket, threading.Event], None]) -> str:
            address = f"ipc://{tmp_path}/hub.sock"
            listener.bind(side_path(parse(address).path) or "")
            listener.listen()

            def run() -> None:
                with listener.accept()[0] as peer, contextlib.suppress(OSError):
                    peer.recv(16)
                    answer(peer, ended)

            threads.append(threading.Thread(target=run))
            threads[-1].start()
            return address

        yield begin
        ended.set()
        for thread in threads:
            thread.join()


def give(peer: socket.socket, *descriptors: int, info_bytes: int = 2048) -> None:
    message = messages.pack(Shared(info_bytes, 1, 0))
    rights = array.array("i", descriptors).tobytes()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    peer.sendmsg([len(message).to_bytes(4, "little") + message], ancillary)


def opened(address: str) -> Attachment:
    attachment = Attachment()
    try:
        attachment.open(LocalSockets(parse(address).path), b"t" * 16)
    except BaseException:
        attachment.close()
        raise
    return attachment


def test_place_that_is_looked_up_again_leaves_no_file_to_the_garbage_collector(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, warnings.catch_warnings():
        listener.bind(f"{tmp_path}/hub.sock")
        warnings.simplefilter("error", ResourceWarning)
        with contextlib.closing(LocalSockets(f"{tmp_path}/hub.sock")) as local:
            local.path()
            assert local.path().startswith("/proc/self/fd/")


def test_bell_that_blocks_does_so_no_more(serve: Serve) -> None:
    full = os.eventfd(0, 0)
    os.write(full, (2**64 - 2).to_bytes(8, "little"))
    address = serve(lambda peer, _: give(peer, full, full, full))
    with contextlib.closing(opened(address)) as attachment, pytest.raises(BlockingIOError):
        os.write(attachment.bells[-1], RING)
    os.close(full)


def test_bell_that_cannot_be_rung_is_refused(serve: Serve) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        opened(serve(lambda peer, _: give(peer, writing, writing, writing)))
    os.close(writing)


def test_room_for_infos_that_would_fill_the_memory_is_refused(serve: Serve) -> None:
    with pytest.raises(ValueError, match="info_bytes"):
        opened(serve(lambda peer, _: give(peer, info_bytes=1 << 30)))


def test_side_socket_that_sends_a_byte_now_and_then_takes_no_more_than_its_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "ATTACH_TIMEOUT_S", 0.3)

    def dribble(peer: socket.socket, ended: threading.Event) -> None:
        give(peer, peer.fileno())  # one descriptor of the three that are to come; what follows it is read by itself
        while not ended.wait(0.05):
            peer.send(b"x")

    with pytest.raises(OSError, match="timed out"):
        opened(serve(dribble))


def test_path_without_a_socket_says_how_a_hub_is_started_there(tmp_path: Path) -> None:
    sockets = LocalSockets(str(tmp_path / "hub.sock"))
    sockets.path()
    assert f"start a hub as this user with `envhub serve --bind ipc://{tmp_path}/hub.sock`" in sockets.why_silent()


def test_folder_in_the_place_of_a_socket_is_none_and_costs_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    path = tmp_path / "hub.sock"
    for _ in range(3):
        sockets = LocalSockets(str(path))
        path.mkdir(exist_ok=True)
        with pytest.raises(AddressError, match="is no socket; write the ipc address"):
            LocalSockets(str(path))
        assert sockets.path() == NOWHERE and sockets.refuses() and not sockets.has_moved()
        sockets.close()
        path.rmdir()
    assert len(os.listdir("/proc/self/fd")) <= before


# --- sockets of ZeroMQ ------------------------------------------------------------------------------------------------


def test_socket_can_be_monitored_while_an_earlier_one_of_its_identity_is_still_being_closed() -> None:
    """A client opens anew what an interrupt came in between; Python soon gives the same ``id`` out again."""
    with zmq.Context() as context:
        for _ in range(200):
            with context.socket(zmq.DEALER) as socket:
                monitor = sockets.open_monitor(socket, zmq.EVENT_DISCONNECTED)
            monitor.close()


def test_message_is_received_up_to_a_number_of_frames_and_the_rest_discarded_in_parts() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://frames")
        theirs.connect("inproc://frames")
        for count in (3, 4, 10):
            theirs.send_multipart([b"%d" % number for number in range(count)])
        theirs.send(b"next")
        assert [frame.bytes for frame in sockets.receive(ours, 4)] == [b"0", b"1", b"2"]
        assert not sockets.receive(ours, 4)[-1].more
        first = sockets.receive(ours, 4)
        assert len(first) == 4 and first[-1].more
        assert [sockets.discard(ours, 4), sockets.discard(ours, 4)] == [False, True]
        assert [frame.bytes for frame in sockets.receive(ours, 4)] == [b"next"]


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("handler", ["absent", "ended", "silent"])
def test_address_lets_nobody_in_while_nobody_answers_for_it(handler: str, keys: bool) -> None:
    public, secret = sockets.new_key_pair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for socket in (router, dealer):
            socket.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.HANDSHAKE_IVL, 200)
        with contextlib.ExitStack() as answering:
            if handler != "absent":
                answering.enter_context(context.socket(zmq.REP)).bind("inproc://zeromq.zap.01")
            if handler == "ended":
                answering.close()
            sockets.ask_before_admitting(router, secret if keys else None, b"envhub")
            port = router.bind_to_random_port("tcp://127.0.0.1")
            if keys:
                sockets.present_keys(dealer, HubKeys(public, sockets.new_key_pair()[1]))
            failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            monitor = sockets.open_monitor(dealer, failed | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealer.send(b"x")
            assert monitor.poll(5000)
            assert recv_monitor_message(monitor)["event"] & failed and not router.poll(0)
            dealer.monitor(None, 0)
            monitor.close()
