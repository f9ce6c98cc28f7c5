"""Makes ``golden.json``: frames of every message and values of every kind, in hex, for clients in any language.

python tests/conformance/golden.py > tests/conformance/golden.json
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
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
TOKEN = bytes(range(16))

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


class Opaque:
    def __repr__(self) -> str:
        return "<opaque>"


SPEC = codec.encode(EnvSpec("Some-v0", "module:Class", kwargs={"size": (2, 3)}, max_episode_steps=100))
VALUES: dict[str, Any] = {
    "nil, bools, numbers, text, bytes": [None, True, -1, 2**63, 0.5, "ä", b"\x00\xff"],
    "list and map": {"a": [1, {"b": []}]},
    "tuple": (1, (2,)),
    "set of one": {3},
    "frozen set of one": frozenset(["x"]),
    "integers beyond 64 bits": [2**70, -(2**70)],
    "complex": 1.5 - 2j,
    "map with other keys": {1: "one", (2,): "two"},
    "array": np.array([[1.5, -2], [0, 3]], np.float32),
    "array of no dimension": np.array(7, np.int16),
    "NumPy scalar": np.int64(-3),
    "array of text": np.array(["a", "bc"]),
    "array of times": np.array(["2026-01-01"], "M8[D]"),
    "time": np.datetime64("2026-01-01", "D"),
    "generator": np.random.Generator(np.random.PCG64(7)),
    "NumPy text": np.str_("ä"),
    "stand-in": Opaque(),
    "spec": codec.decode(SPEC),
    "space": gym_spaces.Discrete(3),
    "graph": gym_spaces.GraphInstance(np.zeros((1, 1), np.float32), None, None),
}


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

    exchange("HELLO", Op.HELLO, messages.Hello("0.1.0"), messages.Welcome("0.1.0", "1.2", False, {"sessions_max": 64}))
    exchange("LIST", Op.LIST, messages.Question(), messages.EnvNames(["CartPole-v1"]))
    exchange("HEALTH", Op.HEALTH, messages.Question(), messages.Table([{"status": "ok"}]))
    exchange("STATS", Op.STATS, messages.Question(), messages.Table([{"sessions": 1}]))
    exchange("SESSIONS", Op.SESSIONS, messages.Question(), messages.Table([{"session": "00010203"}]))
    space, action = (codec.encode(spaces.describe(one)) for one in (SPACES, gym_spaces.Discrete(2)))
    make = messages.Make(2, "CartPole-v1", codec.encode({"gravity": 9.8}), num_workers=1, autoreset_mode="SameStep")
    exchange("MAKE", Op.MAKE, make, messages.Made(2, 1, [space], action, codec.encode({}), "rgb_array", SPEC))
    reset = messages.Reset([1, None], [True, False], codec.encode({"level": 3}))
    exchange("RESET", Op.RESET, reset, messages.Done(), (), [bytes(8)])
    packed = actions.pack([np.array([0, 1]), [1, 0], ("a", "b")], [Leaf("<i8", ()), Leaf("<i8", ()), OBJECT], 2)
    beside = messages.pack_rows((row, codec.encode([word])) for row, word in enumerate("ab"))
    sent = [*(array.tobytes() for array in packed.arrays), beside]
    infos = messages.pack_rows([(1, codec.encode({"lives": np.int64(3)}))])
    exchange("STEP", Op.STEP, messages.Step(packed.codes), messages.Done(), sent, [bytes(8), bytes(20), infos])
    call = messages.Call("render", codec.encode([[], {}]))
    results = messages.pack_rows([(0, codec.encode(1)), (1, codec.encode(2))])
    exchange("CALL", Op.CALL, call, messages.Done(), (), [results])
    exchange("SET_ATTR", Op.SET_ATTR, messages.SetAttr("gravity", [codec.encode(1.5)]), messages.Done())
    failure = messages.Failure(
        "env_raised", "env", "no", 1, 0, "builtins.ValueError", codec.encode(["no"]), "Traceback"
    )
    exchange("STEP that fails", Op.STEP, messages.Step(b""), failure)
    hub.goodbye(TOKEN, messages.Failure("draining", "hub", "the hub is stopping"))
    ((_, found["GOODBYE"]),) = hub.outgoing
    hub.outgoing.clear()
    exchange("CLOSE", Op.CLOSE, messages.Close(True), messages.Done())
    found["PING"] = [Prelude(Op.PING, HUB_ID, bytes(16), 0).pack()]
    return found


def golden() -> dict[str, Any]:
    """Everything, in hex."""
    return {
        "exchanges": {name: [bytes(frame).hex() for frame in frames] for name, frames in exchanges().items()},
        "values": {name: codec.encode(value, codec.as_repr).hex() for name, value in VALUES.items()},
    }


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
