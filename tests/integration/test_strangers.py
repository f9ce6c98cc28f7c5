"""Nothing that a peer sends or a worker announces ends a hub, holds it up, or costs its other clients anything."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from conformance.kit.raw_peer import RawPeer
from hubs import ServedHub, serve, wait_until
from zmtp import ZmtpPeer

import envhub
from envhub.protocol import messages
from envhub.protocol import prelude as protocol
from envhub.protocol.messages import REPLY, Close, Failure, Faults, Make, Observe, Op, Reset
from envhub.protocol.prelude import Prelude
from envhub.values import codec, leaf

OFFERED = (
    "counter=sims:counter",
    "stubborn=odd_sims:Stubborn",
    "liar=odd_sims:Liar",
    "many=odd_sims:Many",
    "talker=odd_sims:Talker",
)


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A hub of these tests' own, which may end."""
    with serve(tmp_path_factory.mktemp("met"), *OFFERED) as hub:
        yield hub


@pytest.fixture
def honest(met: ServedHub) -> Iterator[envhub.HubVectorEnv]:
    """A client that steps before and after, of a hub that found no bug in itself."""
    with contextlib.closing(envhub.make_vec("counter", 2, hub=met.tcp, lane="wire")) as envs:
        envs.reset()
        envs.step(np.zeros(2, int))
        yield envs
        assert met.process.poll() is None and "internal_error" not in met.log
        assert envs.step(np.zeros(2, int))[0][:, 0].tolist() == [2, 2]


@pytest.fixture
def stranger(met: ServedHub) -> Iterator[RawPeer]:
    with contextlib.closing(RawPeer(met.tcp)) as peer:
        yield peer


# --- leaves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("announced", "why"),
    [(["|O", [2]], "dtype '|O'"), (["O", []], "no fixed size"), (["<f8", [1 << 20, 1 << 20]], "more than")],
    ids=str,
)
@pytest.mark.usefixtures("honest")
def test_leaf_that_is_no_array_of_numbers_never_becomes_shared_memory(
    stranger: RawPeer, announced: list[object], why: str
) -> None:
    """NumPy takes the items of an object array for pointers, whatever a worker has written there."""
    token = os.urandom(16)
    make = Make(1, "liar", kwargs=codec.encode({"announced": announced}))
    answer = stranger.ask(Op.MAKE, messages.pack(make), token)
    if answer.prelude.op == REPLY | Op.MAKE:
        stranger.ask(Op.RESET, messages.pack(Reset()), token, 2)
        stranger.ask(Op.OBSERVE, messages.pack(Observe(token)), seq=2)
    assert answer.failure is not None and answer.failure.code == "limit" and why in answer.failure.message


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("observations", marks=pytest.mark.chaos), "actions"])
def test_space_of_more_leaves_than_a_message_has_frames_is_refused_at_make(
    met: ServedHub, honest: envhub.HubVectorEnv, kind: str
) -> None:
    most = leaf.LEAVES_MAX
    with contextlib.closing(envhub.make_vec("many", 2, hub=met.tcp, env_kwargs={kind: most})) as envs:
        envs.reset()
        envs.step(envs.action_space.sample())
    with pytest.raises(envhub.RequestRefused, match=f"space of {most + 1} leaves; at most {most} are carried"):
        envhub.make_vec("many", 2, hub=met.tcp, env_kwargs={kind: most + 1})


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_time_that_is_none_stops_no_clock(met: ServedHub, honest: envhub.HubVectorEnv, stranger: RawPeer) -> None:
    """Its session would be closing for ever, and no worker of another one be replaced meanwhile."""
    close_s = math.nan
    token = os.urandom(16)
    make = messages.pack(Make(1, "stubborn", faults=Faults(close_s=close_s)))
    answer = stranger.ask(Op.MAKE, make, token)
    stranger.send([Prelude(Op.CLOSE, stranger.hub_id, token, 2).pack() + messages.pack(Close())])
    with contextlib.closing(envhub.make_vec("counter", 1, hub=met.tcp, lane="wire", restart_wait=20.0)) as envs:
        envs.reset()
        (pid,), started = envs.call("pid"), met.log.count("worker_started")
        os.kill(pid, signal.SIGKILL)
        envs.step_async(np.zeros(1, int))
        envs.step_wait(timeout=30)  # a truncation, by the hub in the place of the worker
        assert wait_until(lambda: met.log.count("worker_started") > started and steps_to(envs, 2), 20)
    assert answer.failure is not None and answer.failure.code == "refused"
    assert f"Faults.close_s is {close_s}" in answer.failure.message


def steps_to(envs: envhub.HubVectorEnv, count: int) -> bool:
    envs.step_async(np.zeros(1, int))
    return int(envs.step_wait(timeout=30)[0][0, 0]) == count


def test_seed_of_any_size_is_refused_by_name_or_used(stranger: RawPeer, honest: envhub.HubVectorEnv) -> None:
    token = os.urandom(16)
    assert stranger.ask(Op.MAKE, messages.pack(Make(1, "counter")), token).failure is None
    assert stranger.ask(Op.RESET, messages.pack(Reset(seeds=[2**200])), token, 2).failure is None
    refused = stranger.ask(Op.RESET, messages.pack(Reset(seeds=[2**257])), token, 3).failure
    assert refused is not None and "Reset.seeds" in refused.message
    assert stranger.ask(Op.CLOSE, messages.pack(Close()), token, 4).failure is None


# --- what workers say -------------------------------------------------------------------------------------------------


def test_descriptors_that_a_worker_sends_are_not_taken(met: ServedHub, honest: envhub.HubVectorEnv) -> None:
    with contextlib.closing(envhub.make_vec("talker", 1, hub=met.tcp, lane="wire")) as envs:
        envs.reset()
        before = psutil.Process(met.process.pid).num_fds()
        envs.call("speak", "Suspicious", 0, "x", descriptors=200, times=5)
        envs.step(np.zeros(1, int))
        assert psutil.Process(met.process.pid).num_fds() < before + 200


@pytest.mark.parametrize(
    "said", [("Suspicious", -1, ""), ("RowInfo", 1 << 62, b""), ("InfoTemplate", -1, b"")], ids=str
)
def test_worker_that_sends_a_number_out_of_bounds_is_ended(
    met: ServedHub, honest: envhub.HubVectorEnv, said: tuple[object, ...]
) -> None:
    with contextlib.closing(envhub.make_vec("talker", 1, hub=met.tcp, lane="wire", restart_wait=20.0)) as envs:
        envs.reset()
        with contextlib.suppress(envhub.WorkerDied):  # the call may have been done before the hub read what was said
            envs.call("speak", *said)
        assert wait_until(lambda: bool(re.search(rf"{said[0]}\.\w+ is .* is not between", met.log)))
        envs.step(np.zeros(1, int))


# --- routing ids ------------------------------------------------------------------------------------------------------

CLAIMS = 64
FIRST_ROUTING_ID = """
import zmq
from envhub.transport.sockets import seed_routing_ids
seed_routing_ids()
with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
    dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    dealer.send(b"")
    print(router.recv().hex())
"""


def routing_ids_without_a_seed() -> list[bytes]:
    """What libzmq (4.3.5) gives out first in a process that has not seeded ``rand``, as it never does itself."""
    libc = ctypes.CDLL(None)
    libc.srand(1)
    first = libc.rand() | (libc.rand() << 31) & 0xFFFFFFFF
    return [b"\0" + struct.pack(">I", (first + number) & 0xFFFFFFFF) for number in range(CLAIMS)]


@pytest.mark.long
def test_peer_that_claims_the_next_routing_ids_does_not_end_the_hub(tmp_path_factory: pytest.TempPathFactory) -> None:
    """libzmq gives its own ids out without a look at those that peers have chosen, and aborts at the second one."""
    with serve(tmp_path_factory.mktemp("claimed"), "counter=sims:counter") as hub, contextlib.ExitStack() as opened:
        for routing_id in routing_ids_without_a_seed():
            opened.enter_context(ZmtpPeer(hub.tcp, routing_id))
        for _ in range(4):
            opened.enter_context(contextlib.closing(RawPeer(hub.tcp)))
        with contextlib.closing(envhub.make_vec("counter", 2, hub=hub.tcp, lane="wire")) as envs:
            envs.reset()
            assert envs.step(np.zeros(2, int))[0][:, 0].tolist() == [1, 1]
        assert hub.process.poll() is None


def test_every_hub_begins_its_routing_ids_elsewhere() -> None:
    started = [sys.executable, "-c", FIRST_ROUTING_ID]
    found = {subprocess.run(started, capture_output=True, text=True, check=True, timeout=60).stdout for _ in range(3)}
    assert len(found) == 3 and all(len(line.strip()) == 10 and line.startswith("00") for line in found)


# --- headers and frames -----------------------------------------------------------------------------------------------

MIB = 1 << 20
EMPTY_LISTS = b"\x81\xa8num_envs\xdc\x00\x80" + (b"\xdc\xff\xff" + b"\x90" * 0xFFFF) * 128  # 8 MiB
FRAMES, FRAMES_MANY = 100_000, 1_000_000


@pytest.mark.usefixtures("honest")
@pytest.mark.parametrize("op", [Op.HELLO, Op.RESET])
def test_header_of_millions_of_lists_is_refused_and_takes_no_memory(met: ServedHub, stranger: RawPeer, op: Op) -> None:
    token, seq = (bytes(16), 1) if op == Op.HELLO else (os.urandom(16), 1)
    if op == Op.RESET:
        assert stranger.ask(Op.MAKE, messages.pack(Make(1, "counter")), token).failure is None
        seq = 2
    before = peak_rss(met)
    failure = stranger.ask(op, EMPTY_LISTS, token, seq).failure
    if op == Op.RESET:
        assert stranger.ask(Op.CLOSE, messages.pack(Close()), token, 3).failure is None
    assert peak_rss(met) - before < 128 * MIB
    assert failure is not None and failure.code == "malformed"
    assert f"a header of more than {codec.HEADER_ITEMS_MAX} items" in failure.message


def peak_rss(hub: ServedHub) -> int:
    """The most memory that the hub ever had."""
    (line,) = [line for line in Path(f"/proc/{hub.process.pid}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024


def test_bytes_that_the_hub_passes_on_have_no_place_in_the_limit_of_headers(met: ServedHub) -> None:
    large = np.arange(codec.HEADER_BYTES_MAX, dtype=np.float64)
    with contextlib.closing(envhub.make_vec("counter", 2, hub=met.tcp, lane="wire")) as envs:
        envs.reset(options={"large": large})
        envs.set_attr("note", [large, large])
        assert all(np.array_equal(note, large) for note in envs.get_attr("note"))


def test_message_of_too_many_frames_ends_its_connection(met: ServedHub, honest: envhub.HubVectorEnv) -> None:
    with ZmtpPeer(met.tcp) as peer, envhub.connect(met.tcp) as client:
        before = client.stats()
        peer.connection.settimeout(30)
        peer.ask(Op.STATS, b"\x80", bytes(16), 2)
        peer.receive()
        peer.connection.sendall(b"\x01\x00" * FRAMES + b"\x00\x00")
        assert peer.ends()
        counted = ("malformed", "connections_ended")
        assert [client.stats()[name] for name in counted] == [before[name] + 1 for name in counted]
        assert honest.call("pid")  # its session does not notice


def test_message_of_as_many_frames_as_are_accepted_is_answered(met: ServedHub) -> None:
    with contextlib.closing(RawPeer(met.tcp)) as peer:
        frames = [b""] * (protocol.FRAMES_MAX - 1)
        assert peer.ask(Op.HEALTH, messages.pack(messages.Question()), bytes(16), 2, *frames).failure is None


class Flooding(threading.Thread):
    """A hub that answers everything with more frames than a message may have."""

    def __init__(self) -> None:
        super().__init__()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def run(self) -> None:
        peer, request = self._socket.recv_multipart()
        prelude = Prelude.unpack(request)
        reply = Prelude(REPLY | prelude.op, 1, prelude.token, prelude.seq).pack() + messages.pack(messages.EnvNames([]))
        self._socket.send_multipart([peer, reply, *[b""] * protocol.FRAMES_MAX])

    def close(self) -> None:
        self.join()
        self._context.destroy(linger=0)


def test_client_refuses_a_message_of_too_many_frames() -> None:
    with contextlib.closing(Flooding()) as hub:
        hub.start()
        with pytest.raises(envhub.RemoteProtocolError, match=f"more than {protocol.FRAMES_MAX} frames"):
            envhub.connect(hub.address)


# --- hostile requests -------------------------------------------------------------------------------------------------


class Raw(RawPeer):
    """A peer that knows to expect failures."""

    def refusal(self, op: int, body: bytes, token: bytes = bytes(16), seq: int = 1, *frames: bytes) -> Failure:
        answer = self.ask(op, body, token, seq, *frames)
        assert answer.failure is not None and answer.prelude.seq == seq
        return answer.failure


@pytest.fixture
def raw(hub: ServedHub) -> Iterator[Raw]:
    peer = Raw(hub.tcp)
    yield peer
    peer.close()


@pytest.fixture(autouse=True)
def _honest(hub: ServedHub) -> Iterator[None]:
    """An honest client that steps before and after, on a hub whose process stays the same."""
    envs = envhub.make_vec("counter", 2, hub=hub.ipc)
    envs.reset()
    envs.step(np.array([1, 1]))
    yield
    assert envs.step(np.array([1, 1]))[0][:, 0].tolist() == [2, 2]
    envs.close()
    assert hub.process.poll() is None


def test_misuse_of_a_session_is_refused_and_the_session_goes_on(raw: Raw) -> None:
    token = b"s" * 16
    made, body, _ = raw.ask(Op.MAKE, messages.pack(Make(2, "counter")), token, 1)
    assert made.op == REPLY | Op.MAKE, body
    assert raw.refusal(Op.STEP, b"\x04", token, 0, bytes(16)).code == "bad_seq"
    assert raw.refusal(Op.STEP, b"", token, 2).code == "bad_actions"
    assert raw.refusal(Op.STEP, b"\x04", token, 3, bytes(15)).code == "bad_actions"
    assert raw.refusal(Op.STEP, b"\x7f", token, 4, bytes(16)).code == "bad_actions"
    assert raw.refusal(Op.STEP, b"\x04\x04", token, 5, bytes(16)).code == "bad_actions"
    assert raw.refusal(Op.RESET, messages.pack(Reset(mask=[True])), token, 6).code == "refused"
    assert raw.refusal(Op.RESET, messages.pack(Reset(seeds=[1, 2, 3])), token, 7).code == "refused"
    assert raw.ask(Op.RESET, messages.pack(Reset()), token, 8)[0].op == REPLY | Op.RESET
    assert raw.ask(Op.STEP, b"\x04", token, 9, bytes(16))[0].op == REPLY | Op.STEP
    assert raw.ask(Op.STEP, b"\x04", token, 9, bytes(16))[0].op == REPLY | Op.STEP  # the same one again
    assert raw.ask(Op.CLOSE, messages.pack(Close()), token, 10)[0].op == REPLY | Op.CLOSE


def test_absurd_wishes_are_refused(raw: Raw) -> None:
    wishes = [
        Make(0, "counter"),
        Make(-5, "counter"),
        Make(10**9, "counter"),
        Make(2, "counter", num_workers=-1),
        Make(2, "counter", num_workers=10**9),
        Make(2, "counter", spin_us=10**6),
        Make(2, "counter", autoreset_mode="Sometimes"),
        Make(2, "counter", factories=b"cos\nsystem\n(S'touch /tmp/pwned'\ntR."),
        Make(2, "../../etc/passwd"),
    ]
    for number, wish in enumerate(wishes):
        failure = raw.refusal(Op.MAKE, messages.pack(wish), bytes([50 + number]) * 16)
        assert failure.code in ("limit", "refused", "not_permitted", "unknown_env"), failure


def test_arguments_with_a_pickle_are_never_unpickled(raw: Raw) -> None:
    import msgpack

    bomb = msgpack.packb({"x": msgpack.ExtType(10, b"cbuiltins\nexit\n(I3\ntR.")})
    assert raw.refusal(Op.MAKE, messages.pack(Make(2, "counter", kwargs=bomb)), b"p" * 16).code == "factory_failed"


def test_private_names_of_an_env_are_neither_called_nor_set(hub: ServedHub, raw: Raw) -> None:
    envs = envhub.make_vec("counter", 2, hub=hub.tcp)
    for ask in (
        lambda: envs.call("__setstate__", {}),
        lambda: envs.get_attr("__dict__"),
        lambda: envs.set_attr("_x", 1),
    ):
        with pytest.raises(envhub.errors.RequestRefused, match="underscore"):
            ask()
    envs.close()
    token = b"u" * 16
    raw.ask(Op.MAKE, messages.pack(Make(2, "counter")), token, 1)
    assert raw.refusal(Op.CALL, messages.pack(messages.Call("__reduce__", b"")), token, 2).code == "not_permitted"
    assert raw.refusal(Op.SET_ATTR, messages.pack(messages.SetAttr("_x", [b"\x01"])), token, 3).code == "not_permitted"
    raw.ask(Op.CLOSE, messages.pack(Close()), token, 4)
