"""Makes ``golden.json``: frames and values in hex, for clients and hubs in any language.

============  =========================================================================================================
session       a whole session, whose frames fit each other; PROTOCOL.md shows some
steps         the program `steps` of the kit: its requests and the replies, with all values
exchanges     a request and a reply of every kind, each by itself: the arrays in them are of no space
values        a value of every kind
says          what each of ``values`` is
refusals      messages to a hub in which the session of ``session`` was just made, and what the hub does: "runs",
              "dropped", or the code of the failure
bad_values    bytes that are no values, which a receiver refuses
============  =========================================================================================================

cd tests && python -m conformance.golden > conformance/golden.json
"""

from __future__ import annotations

import json
from typing import Any

import msgpack
import numpy as np
from conformance.kit.counting_envs import CHECK, NAME, NUM_ENVS, SEEDS, STEPS, CountingSession
from gymnasium import spaces as gym_spaces
from gymnasium.envs.registration import EnvSpec

from envhub.protocol import messages
from envhub.protocol.client import ClientProtocol
from envhub.protocol.hub import HubProtocol
from envhub.protocol.messages import Op
from envhub.protocol.prelude import Prelude
from envhub.values import actions, codec, spaces
from envhub.values.leaf import OBJECT, Leaf

HUB_ID = 0x0123456789ABCDEF
LIMITS = {"envs_per_session_max": 1024, "message_bytes_max": 67108864}  # those that a client reads
TOKEN, OTHER_TOKEN = bytes(range(16)), bytes(range(16, 32))

SPACES = gym_spaces.Dict(
    {
        "box": gym_spaces.Box(-1, 1, (2,), np.float32),
        "discrete": gym_spaces.Discrete(3, start=-1),
        "multi": gym_spaces.Tuple([gym_spaces.MultiDiscrete([2, 3]), gym_spaces.MultiBinary(2)]),
        "text": gym_spaces.Text(4, charset="ab"),
        "sequence": gym_spaces.Sequence(gym_spaces.Discrete(2), stack=True),
        "graph": gym_spaces.Graph(gym_spaces.Box(0, 1, (1,)), gym_spaces.Discrete(2)),
        "one_of": gym_spaces.OneOf([gym_spaces.Discrete(2), gym_spaces.Text(2, charset="x")]),
    }
)

SPACES.seed(1)  # some make a generator of their own at once


# Each value as a Python expression, in which np is NumPy.
SAYS: dict[str, str] = {
    "nil, bools, numbers, text, bytes": r"[None, True, -1, 2**63, 0.5, 'ä', b'\x00\xff']",
    "list and map": "{'a': [1, {'b': []}]}",
    "tuple": "(1, (2,))",
    "set of one": "{3}",
    "frozen set of one": "frozenset(['x'])",
    "integers beyond 64 bits": "[2**70, -(2**70)]",
    "complex": "1.5 - 2j",
    "map with other keys": "{1: 'one', (2,): 'two'}",
    "array": "np.array([[1.5, -2], [0, 3]], np.float32)",
    "array of no dimension": "np.array(7, np.int16)",
    "NumPy scalar": "np.int64(-3)",
    "array of text": "np.array(['a', 'bc'])",
    "array of times": "np.array(['2026-01-01'], 'M8[D]')",
    "time": "np.datetime64('2026-01-01', 'D')",
    "generator": "np.random.Generator(np.random.PCG64(7))",
    "NumPy text": "np.str_('ä')",
    "stand-in": "Repr('<opaque>')",
    "spec": "EnvSpec('Some-v0', 'module:Class', kwargs={'size': (2, 3)}, max_episode_steps=100)",
    "space": "Discrete(3)",
    "graph": "GraphInstance(np.zeros((1, 1), np.float32), None, None)",
}
NAMES = {
    "np": np,
    "Repr": codec.Repr,
    "EnvSpec": EnvSpec,
    "Discrete": gym_spaces.Discrete,
    "GraphInstance": gym_spaces.GraphInstance,
}
VALUES: dict[str, Any] = {name: eval(text, dict(NAMES)) for name, text in SAYS.items()}
SPEC = codec.encode(VALUES["spec"])


def exchanges() -> dict[str, list[bytes]]:
    """The frames of one client's session, in order."""
    hub, client = HubProtocol(HUB_ID), ClientProtocol(TOKEN)
    found: dict[str, list[bytes]] = {}

    def heartbeat(name: str, now_s: float) -> None:
        (request,) = client.tick(now_s)
        if (asked := hub.receive(b"peer", 1, request)) is not None:  # the hub knows how far a running request is
            hub.answer(asked, messages.HeartbeatReply("running"))
        _, response = hub.outgoing.pop()
        client.receive(response, now_s)
        found[f"{name} request"], found[f"{name} reply"] = request, response

    def exchange(name: str, op: Op, message: Any, reply: Any, sent: Any = (), answered: Any = ()) -> None:
        request = client.request(op, message, sent, 0.0)
        incoming = hub.receive(b"peer", 1, request)
        assert incoming is not None
        if name == "CALL":
            heartbeat("HEARTBEAT while it runs", 2.0)
        if isinstance(reply, messages.Failure):
            hub.fail(incoming, reply)
        else:
            hub.answer(incoming, reply, answered)
        ((_, response),) = hub.outgoing
        hub.outgoing.clear()
        assert client.receive(response, 0.0) is not None
        found[f"{name} request"], found[f"{name} reply"] = request, response

    # A client ignores the last limit.
    welcome = messages.Welcome("0.1.0", "1", False, {**LIMITS, "sessions_max": 64})
    exchange("HELLO", Op.HELLO, messages.Hello("0.1.0"), welcome)
    exchange("LIST", Op.LIST, messages.Question(), messages.EnvNames(["CartPole-v1"]))
    end = messages.Operate("end", b"\1\2", "00010203", why="a demo")
    for op, question, row in (
        (Op.HEALTH, messages.Question(), {"status": "ok"}),
        (Op.STATS, messages.Question(), {"sessions": 1}),
        (Op.STATUS, messages.Status(), {"session": "00010203"}),
        (Op.OPERATE, end, {"session": "00010203"}),
    ):
        exchange(op.name, op, question, messages.Table([row]))
    space, action = (codec.encode(spaces.describe(one)) for one in (SPACES, gym_spaces.Discrete(2)))
    make = messages.Make(2, "CartPole-v1", codec.encode({"gravity": 9.8}), num_workers=1, autoreset_mode="SameStep")
    exchange("MAKE", Op.MAKE, make, messages.Made(2, 1, [space], action, codec.encode({}), "rgb_array", SPEC, window=4))
    reset = messages.Reset([1, None], [True, False], codec.encode({"level": 3}))
    exchange("RESET", Op.RESET, reset, messages.Done(), (), [bytes(8)])
    packed = actions.pack([np.array([0, 1]), [1, 0], ("a", "b")], [Leaf("<i8", ()), Leaf("<i8", ()), OBJECT], 2)
    words = ((row, codec.encode([word])) for row, word in enumerate("ab"))
    sent = [*(array.tobytes() for array in packed.arrays), messages.pack_rows(words)]
    answered = [bytes(8), bytes(20), messages.pack_rows([(1, codec.encode({"lives": np.int64(3)}))])]
    exchange("STEP", Op.STEP, messages.Step(packed.codes), messages.Done(), sent, answered)
    results, were_set = ([messages.pack_rows(enumerate(blobs))] for blobs in ([b"\x01", b"\x02"], [b"", b""]))
    exchange("CALL", Op.CALL, messages.Call("render", codec.encode([[], {}])), messages.Done(), (), results)
    exchange("SET_ATTR", Op.SET_ATTR, messages.SetAttr("gravity", [codec.encode(1.5)]), messages.Done(), (), were_set)
    found.update(parts(hub, client))
    failure = messages.Failure(
        "env_raised", "env", "no", 1, 0, "builtins.ValueError", codec.encode(["no"]), "Traceback"
    )
    exchange("STEP that fails", Op.STEP, messages.Step(b""), failure)
    hub.goodbye(TOKEN, messages.Failure("draining", "hub", "the hub is stopping"))
    ((_, found["GOODBYE"]),) = hub.outgoing
    hub.outgoing.clear()
    exchange("CLOSE", Op.CLOSE, messages.Close(True), messages.Done())
    return {**found, "PING": [Prelude(Op.PING, HUB_ID, bytes(16), 0).pack()]}


def parts(hub: HubProtocol, client: ClientProtocol) -> dict[str, list[bytes]]:
    """The frames of a SEND, of a RECEIVE, and of a SEND in its window, which has the results of both."""
    found: dict[str, list[bytes]] = {}
    rows = [np.array([1]).tobytes(), bytes(8), bytes(10)]
    for name, op, message, sent, answered in (
        ("SEND", Op.SEND, messages.Send([1], b"\x04"), [bytes(8)], ()),
        ("RECEIVE", Op.RECEIVE, messages.Receive(1), (), rows),
        ("SEND in the window", Op.SEND, messages.Send([0], b"\x04", min_envs=1), [bytes(8)], rows),
    ):
        request = client.request(op, message, sent, 0.0)
        incoming = hub.receive(b"peer", 1, request)
        assert incoming is not None
        hub.answer(incoming, messages.Done(), answered)
        ((_, response),) = hub.outgoing
        hub.outgoing.clear()
        if op is Op.SEND:  # the client has not heard the reply to RECEIVE
            assert client.receive(response, 0.0) is None and client.received.pop().frames == response[1:]
        found[f"{name} request"], found[f"{name} reply"] = request, response
    client.receive(found["RECEIVE reply"], 0.0)  # else the next step would be held
    return found


def session() -> dict[str, list[bytes]]:
    """The frames of a session of two envs, in order; the client sends only the fields that have no default value."""
    hub, found = HubProtocol(HUB_ID), {}

    def exchange(op: Op, seq: int, fields: bytes, reply: Any, sent: Any = (), answered: Any = ()) -> None:
        hub_id, token = (0, bytes(16)) if op is Op.HELLO else (HUB_ID, TOKEN)
        request = [Prelude(op, hub_id, token, seq).pack() + fields, *sent]
        incoming = hub.receive(b"peer", 1, request)
        assert incoming is not None
        hub.answer(incoming, reply, answered)
        ((_, response),) = hub.outgoing
        hub.outgoing.clear()
        found[f"{op.name} request"], found[f"{op.name} reply"] = request, response

    welcome = messages.Welcome("0.1.0", "1", False, LIMITS, "simbox", 7)
    exchange(Op.HELLO, 1, codec.encode({"client": "0.1.0"}), welcome)
    box, two = gym_spaces.Box(-1, 1, (4,), np.float32), gym_spaces.Discrete(2)
    observation, action = (codec.encode(spaces.describe(space)) for space in (box, two))
    make = codec.encode({"num_envs": 2, "name": "Example-v0"})
    exchange(Op.MAKE, 1, make, messages.Made(2, 1, [observation], action, codec.encode({})))
    first = np.zeros((2, 4), np.float32)
    exchange(Op.RESET, 2, codec.encode({"seeds": [7, 8]}), messages.Done(), (), [first.tobytes()])
    codes, batches, _ = actions.pack([np.array([0, 1])], [Leaf("<i8", ())], 2)
    observations = np.array([[0, 0.5, 0, -0.5], [1, 0, -1, 0]], np.float32)
    results = np.ones(2).tobytes() + bytes([False, False, False, True])
    infos = messages.pack_rows([(1, codec.encode({"n": np.int64(3)}))])
    answered = [observations.tobytes(), results, infos]
    exchange(Op.STEP, 3, codes, messages.Done(), [batch.tobytes() for batch in batches], answered)
    exchange(Op.CLOSE, 4, codec.encode({}), messages.Done())
    return found


def steps() -> dict[str, list[bytes]]:
    """The frames of the program by which a client is tested, in order; as in ``session``, without default values."""
    hub, tested = HubProtocol(HUB_ID), CountingSession(OTHER_TOKEN, [])
    found: dict[str, list[bytes]] = {}

    def exchange(name: str, op: Op, seq: int, fields: bytes, sent: Any = ()) -> list[bytes]:
        hub_id, token = (0, bytes(16)) if op is Op.HELLO else (HUB_ID, TOKEN)
        request = [Prelude(op, hub_id, token, seq).pack() + fields, *sent]
        incoming = hub.receive(b"peer", 1, request)
        assert incoming is not None
        outcome = tested.outcome(incoming)
        assert not isinstance(outcome, messages.Failure)
        hub.answer(incoming, *outcome)
        ((_, response),) = hub.outgoing
        hub.outgoing.clear()
        found[f"{name} request"], found[f"{name} reply"] = request, response
        return response[1:]

    exchange("HELLO", Op.HELLO, 1, codec.encode({"client": "0.1.0"}))
    exchange("MAKE", Op.MAKE, 1, codec.encode({"num_envs": NUM_ENVS, "name": NAME}))
    frames = exchange("RESET", Op.RESET, 2, codec.encode({"seeds": SEEDS}))
    rewards, ends, numbers = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int), np.zeros(NUM_ENVS, int)
    for number in range(1, STEPS + 1):
        batch = np.frombuffer(frames[0], np.float32).reshape(NUM_ENVS, 2)[:, 0].astype(np.int64)
        frames = exchange(f"STEP {number}", Op.STEP, 2 + number, b"\x04", [batch.tobytes()])
        rewards += np.frombuffer(frames[1], np.float64, NUM_ENVS)
        ends += np.frombuffer(frames[1], np.bool_, offset=8 * NUM_ENVS).reshape(2, NUM_ENVS).any(axis=0)
        for row, info in messages.unpack_rows(frames[2], NUM_ENVS) if len(frames) > 2 else []:
            numbers[row] += codec.decode(info)["n"]
    args = codec.encode([[rewards.tolist(), ends.tolist(), numbers.tolist()], {}])
    exchange("CALL", Op.CALL, 3 + STEPS, codec.encode({"name": CHECK, "args": args}))
    exchange("CLOSE", Op.CLOSE, 4 + STEPS, codec.encode({}))
    assert tested.wrong == []
    return found


def refusals() -> dict[str, tuple[list[bytes], str]]:
    """Messages to a hub in which the session of ``session`` was made by its first two requests, and what it does."""

    def sent(op: int, body: bytes = b"\x80", seq: int = 2, token: bytes = TOKEN, **prelude: int) -> list[bytes]:
        return [Prelude(op, prelude.get("hub_id", HUB_ID), token, seq, prelude.get("version", 1)).pack() + body]

    def make(**fields: Any) -> list[bytes]:
        return sent(Op.MAKE, codec.encode({"num_envs": 2, "name": "Example-v0", **fields}), 1, OTHER_TOKEN)

    deep: Any = []
    for _ in range(8):
        deep = [deep]
    reset = sent(Op.RESET)[0]
    return {
        "no frame of a prelude's length": ([reset[:39]], "dropped"),
        "another magic": ([b"HTTP" + reset[4:]], "dropped"),
        "another version": (sent(Op.RESET, version=2), "unsupported_version"),
        "an op that is none": (sent(99), "malformed"),
        "the op of a reply": (sent(messages.REPLY | Op.RESET), "malformed"),
        "a push of a hub": (sent(Op.PING), "malformed"),
        "a session's request without a token": (sent(Op.RESET, token=bytes(16)), "malformed"),
        "the id of another hub": (sent(Op.RESET, hub_id=HUB_ID + 1), "stale_hub"),
        "a request of a session that was never made": (sent(Op.RESET, token=OTHER_TOKEN), "session_lost"),
        "a number that was used before": (sent(Op.RESET, seq=0), "bad_seq"),
        "a second MAKE of a token": (sent(Op.MAKE, codec.encode({"num_envs": 2}), 2), "bad_seq"),
        "a header of no bytes": (sent(Op.RESET, b""), "malformed"),
        "a header that is no map": (sent(Op.RESET, b"\x90"), "malformed"),
        "a header that ends early": (sent(Op.RESET, codec.encode({"seeds": [1, 2]})[:-1]), "malformed"),
        "a header with bytes after it": (sent(Op.RESET, b"\x80\x80"), "malformed"),
        "a list of more items than there are bytes": (
            sent(Op.RESET, b"\x81\xa5seeds\xdd\x7f\xff\xff\xff"),
            "malformed",
        ),
        "lists nine deep": (sent(Op.RESET, codec.encode({"seeds": deep})), "malformed"),
        "an extension in a header": (sent(Op.RESET, codec.encode({"seeds": (1, 2)})), "malformed"),
        "a required field that is missing": (
            sent(Op.MAKE, codec.encode({"name": "Example-v0"}), 1, OTHER_TOKEN),
            "malformed",
        ),
        "text where bytes are wanted": (make(kwargs="{}"), "malformed"),
        "a float where an integer is wanted": (make(num_workers=1.0), "malformed"),
        "a number out of its bounds": (make(num_envs=0), "refused"),
        "a number that is not finite": (make(heartbeat_s=float("nan")), "refused"),
        "a policy that is none": (make(faults={"on_crash": "ignore"}), "refused"),
        "an integer where a float is wanted": (make(heartbeat_s=2), "runs"),
        "a field that this version does not know": (make(field_of_a_later_version=1), "runs"),
        "a number that is left out": (sent(Op.RESET, seq=7), "runs"),
    }


def bad_values() -> dict[str, bytes]:
    """Bytes that are no values."""

    def array(
        dtype: Any = None, *shape: int, data: bytes = bytes(8), code: int = codec.ARRAY, kind: bytes = b""
    ) -> bytes:
        named = {} if dtype is None else {b"type": dtype}
        packed = msgpack.packb({b"nd": True, **named, b"kind": kind, b"shape": shape})
        return msgpack.packb(msgpack.ExtType(code, bytes([len(packed)]) + packed + data))

    return {
        "nothing": b"",
        "an integer that ends early": b"\xcd\x01",
        "bytes after the value": b"\x01\x02",
        "a list of more items than there are bytes": b"\xdd\x7f\xff\xff\xff",
        "a map with an integer key": b"\x81\x01\x02",
        "an array of pointers": array("|O", 1, kind=b"O"),
        "an array of a structure": array([["x", "<f4"]], 2, kind=b"V"),
        "an array with a negative dimension": array("<f4", -2),
        "an array with fewer bytes than items": array("<f4", 3),
        "an array of empty texts": array("<U0", 1 << 40, data=b""),
        "an array without its dtype": array(data=b""),
        "a scalar with a dimension": array("<f4", 2, code=codec.SCALAR),
        "a pickle": msgpack.packb(msgpack.ExtType(codec.PICKLE, b"\x80\x04N.")),
        "an extension that is none": msgpack.packb(msgpack.ExtType(99, b"")),
        "a generator whose position is out of its state": msgpack.packb(
            msgpack.ExtType(codec.GENERATOR, codec.encode(["MT19937", {"state": {"key": [0] * 624, "pos": 625}}]))
        ),
        "a code point that is none": array("<U1", 1, data=b"\xff\xff\xff\x7f"),
    }


def golden() -> dict[str, Any]:
    """Everything, in hex."""
    return {
        "session": {name: [bytes(frame).hex() for frame in frames] for name, frames in session().items()},
        "steps": {name: [bytes(frame).hex() for frame in frames] for name, frames in steps().items()},
        "exchanges": {name: [bytes(frame).hex() for frame in frames] for name, frames in exchanges().items()},
        "values": {name: codec.encode(value).hex() for name, value in VALUES.items()},
        "says": SAYS,
        "refusals": {name: [*(frame.hex() for frame in sent), does] for name, (sent, does) in refusals().items()},
        "bad_values": {name: blob.hex() for name, blob in bad_values().items()},
    }


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
