"""Pure: what attackers send, from a seed. Requests are changed bit by bit, by structure, or to any msgpack."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgpack
import zstandard
from envhub_server.ipc import control
from support.codec_attacks import ATTACKS
from support.codec_values import packed
from support.zmtp import frame

from envhub.errors import RemoteProtocolError
from envhub.protocol import messages
from envhub.protocol.messages import Op
from envhub.protocol.prelude import FRAMES_MAX, NO_SESSION, PRELUDE, Prelude
from envhub.values import codec

Message = list[bytes]
ROWS = 2
ACTIONS = bytes(16 * ROWS)
DEPTH_MAX = 3
NUMBERS = [0, 1, -1, 2, 127, 255, 1 << 20, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]
ANNOUNCED = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
SAID = [kind for kind in control.CONTROL.values() if (kind.__doc__ or "").startswith("Worker to hub")]
NAMES = [kind.name for kind in Op]


class Request(NamedTuple):
    """A well-formed request; without its prelude."""

    op: Op
    message: Any  # None for a STEP
    header: bytes
    frames: tuple[bytes, ...] = ()


def request(op: Op, message: Any, *frames: bytes) -> Request:
    return Request(op, message, messages.pack(message), frames)


HUB_REQUESTS = [
    request(Op.HELLO, messages.Hello("0.1.0")),
    request(Op.LIST, messages.Question()),
    request(Op.STATS, messages.Question()),
    request(Op.HEALTH, messages.Question()),
    request(Op.STATUS, messages.Status("ended", "00010203")),
    request(Op.OPERATE, messages.Operate("end", b"\1", "00010203", 0, "no", 1.5)),
]
MAKE = request(
    Op.MAKE, messages.Make(ROWS, "chain", kwargs=codec.encode({"elements": 60}), num_workers=1, compression="lz4")
)
RESET = request(Op.RESET, messages.Reset(seeds=[1, 2], options=codec.encode({})))
# In this order a session accepts them, after MAKE.
SESSION_REQUESTS = [
    RESET,
    Request(Op.STEP, None, b"\x04", (ACTIONS,)),
    request(Op.CALL, messages.Call("render_mode", codec.encode([[], {}]))),
    request(Op.SET_ATTR, messages.SetAttr("note", [codec.encode(number) for number in range(ROWS)])),
    request(Op.SEND, messages.Send([0], b"\x04"), ACTIONS[: len(ACTIONS) // ROWS]),
    request(Op.RECEIVE, messages.Receive(1)),
    request(Op.COLLECT, messages.Collect([])),
    request(Op.TEMPLATES, messages.TemplatesRequest([1])),
]


def unreadable(message: Message) -> bool:
    """Whether a hub may count the message as malformed; a few such messages end a connection."""
    try:
        asked = Prelude.unpack(message[0])
        if asked.op in messages.REQUESTS:
            messages.unpack(messages.REQUESTS[asked.op], message[0][PRELUDE.size :], codec.STRANGERS)
    except (RemoteProtocolError, codec.DecodeError):
        return True
    return len(message) > FRAMES_MAX


def on_the_wire(sent: list[Message]) -> bytes:
    """The bytes of these messages behind a handshake."""
    return b"".join(frame(body, number < len(parts) - 1) for parts in sent for number, body in enumerate(parts))


class Mutator:
    """All that it returns follows from the seed, and from what it was asked before."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._compressed = zstandard.compress(bytes(64 << 20))
        changes: dict[Callable[[Message], Message], int] = {  # how often each is made
            self._flip: 30,
            self._truncate: 10,
            self._retype: 30,
            self._replace_header: 15,
            self._forge_prelude: 20,
            self._resize_frames: 10,
            self._shuffle: 5,
            self._keep: 5,
            self._announce: 5,
            self._add_frames: 3,
        }
        self._changes, self._weights = [*changes], [*changes.values()]

    # --- messages -----------------------------------------------------------------------------------------------------

    def message(self, hub_id: int, token: bytes, seq: int) -> Message:
        """A message of a client whose session has this token, and whose next request this number."""
        chance = self.chance
        kind = chance.randrange(100)
        if kind < 66:
            asked, own = chance.choice(SESSION_REQUESTS), (token, seq)
        elif kind < 94:
            asked, own = chance.choice(HUB_REQUESTS), (NO_SESSION, chance.randrange(1 << 30))
        elif kind < 96:  # those that can be executed make a session with its processes
            asked, own = MAKE, (chance.randbytes(16), 1)
        else:
            session = request(Op.OBSERVE, messages.Observe(chance.choice([token, chance.randbytes(16)])))
            close, beat = request(Op.CLOSE, messages.Close()), Request(Op.HEARTBEAT, None, b"\x80")
            asked = chance.choices([session, beat, close], [8, 8, 1])[0]
            own = (NO_SESSION, 1) if asked is session else (token, seq)
        self._asked = asked
        built = [Prelude(asked.op, hub_id, *own).pack() + asked.header, *asked.frames]
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            built = chance.choices(self._changes, self._weights)[0](built)
        return built or [b""]

    def reply(self, message: Any, built: Message) -> Message:
        """A hub's reply, changed behind its prelude: what a client does not wait for it only drops."""
        self._asked = Request(Op.HELLO, message, b"")
        changes = [self._flip, self._truncate, self._retype, self._replace_header, self._resize_frames, self._announce]
        changed = self.chance.choice([*changes, self._shuffle, self._add_frames])(built)
        return [built[0][: PRELUDE.size] + changed[0][PRELUDE.size :], *changed[1:]]

    def _keep(self, built: Message) -> Message:
        return built

    def _flip(self, built: Message) -> Message:
        return self._in_one(built, self.flipped)

    def flipped(self, body: bytes) -> bytes:
        """Some bits changed, or bytes replaced."""
        changed = bytearray(body)
        for _ in range(self.chance.randrange(1, 6)):
            if changed:
                at = self.chance.randrange(len(changed))
                changed[at] = changed[at] ^ 1 << self.chance.randrange(8) if at % 2 else self.chance.randrange(256)
        return bytes(changed)

    def _truncate(self, built: Message) -> Message:
        return self._in_one(built, lambda body: body[: self.chance.randrange(len(body) + 1)])

    def _in_one(self, built: Message, change: Callable[[bytes], bytes]) -> Message:
        """Change one frame; most often the first one behind its prelude."""
        at = self.chance.randrange(len(built)) if self.chance.random() < 0.3 else 0
        kept = PRELUDE.size if at == 0 and self.chance.random() < 0.8 else 0
        return [*built[:at], built[at][:kept] + change(built[at][kept:]), *built[at + 1 :]]

    def _retype(self, built: Message) -> Message:
        """Any values in some fields of the header."""
        if self._asked.message is None:
            return self._replace_header(built)
        fields = messages.as_map(self._asked.message)
        if isinstance(fields.get("faults"), dict) and self.chance.random() < 0.5:
            inner = self._with_any_values(fields["faults"])
            parts = {name: packed(value) for name, value in fields.items()} | {"faults": inner}
            return [built[0][: PRELUDE.size] + _joined(parts), *built[1:]]
        return [built[0][: PRELUDE.size] + self._with_any_values(fields), *built[1:]]

    def _with_any_values(self, fields: dict[str, Any]) -> bytes:
        parts = {name: packed(value) for name, value in fields.items()}
        for name in self.chance.sample([*parts], min(len(parts), self.chance.randrange(1, 3))):
            parts[name] = self.chance.choice([self.value(), self._near(fields[name])])
        if self.chance.random() < 0.1:
            parts[self.chance.choice(["", "unknown", *NAMES])] = self.value()
        return _joined(parts)

    def _near(self, value: Any) -> bytes:
        """A value of the same type."""
        number = self.chance.choice(NUMBERS)
        if isinstance(value, (bool, float)):
            return packed(self.chance.choice([True, False, float("nan"), float("inf"), -1.0, 1e300, 1e-300]))
        if isinstance(value, int):
            return packed(number)
        if isinstance(value, bytes):
            return packed(self.chance.choice([self.value(), self.flipped(value), bytes(self.chance.randrange(5000))]))
        if isinstance(value, str):
            return packed(self.chance.choice(["\x00", "../x", "chain", "a" * 5000, "\u202e", "_x", "close", "step"]))
        return packed([number] * self.chance.randrange(5)) if isinstance(value, list) else self.value()

    def _replace_header(self, built: Message) -> Message:
        return [built[0][: PRELUDE.size] + self.value(), *built[1:]]

    def _forge_prelude(self, built: Message) -> Message:
        """One field of the prelude that says something else."""
        head, rest = bytearray(built[0][: PRELUDE.size].ljust(PRELUDE.size, b"\0")), built[0][PRELUDE.size :]
        start, length = self.chance.choice([(0, 4), (4, 1), (5, 1), (6, 1), (6, 1), (7, 1), (8, 8), (16, 16), (32, 8)])
        wanted = [bytes(length), b"\xff" * length, self.chance.randbytes(length)]
        if start == 6:
            wanted = [bytes([op]) for op in Op] + [bytes([op | messages.REPLY]) for op in Op]
        head[start : start + length] = self.chance.choice(wanted)
        return [bytes(head) + rest, *built[1:]]

    def _resize_frames(self, built: Message) -> Message:
        chance = self.chance
        sizes = [0, 1, 16, len(ACTIONS) - 1, len(ACTIONS), len(ACTIONS) + 1, 1000]
        frames = [chance.randbytes(chance.choice(sizes)) for _ in range(chance.randrange(4))]
        if chance.random() < 0.05:
            frames.append(self._compressed)
        return [built[0], *frames]

    def _shuffle(self, built: Message) -> Message:
        """Frames lost, doubled and in another order."""
        frames = self.chance.choices(built, k=self.chance.randrange(1, 2 * len(built) + 1))
        return frames if self.chance.random() < 0.5 else [built[0], *frames]

    def _announce(self, built: Message) -> Message:
        """Lists, maps and bytes of which nothing follows, or that are nested without end."""
        bombs = [*ANNOUNCED, b"\x91" * 5000, b"\x81\xa1a" * 2000, b"\xdc\xff\xff" + b"\x90" * 0xFFFF, self._compressed]
        return [built[0][: PRELUDE.size] + self.chance.choice(bombs), *built[1:]]

    def _add_frames(self, built: Message) -> Message:
        count = self.chance.choices([2, 10, 50, FRAMES_MAX, 2 * FRAMES_MAX], [10, 10, 10, 1, 1])[0]
        return [*built, *[self.chance.choice([b"", b"x"])] * count]

    # --- msgpack ------------------------------------------------------------------------------------------------------

    def value(self) -> bytes:
        """Msgpack of any kind, mostly well-formed; lengths are sometimes not those of what follows."""
        whole = packed(self._plain())
        kinds = [whole, whole, self.flipped(whole), self.chance.choice([*ATTACKS.values()])]
        return self.chance.choice([*kinds, self.chance.choice(ANNOUNCED), self.chance.randbytes(20)])

    def _plain(self, depth: int = 0) -> Any:
        chance, count = self.chance, self.chance.randrange(5)
        kinds: list[Callable[[], Any]] = [
            lambda: chance.choice([None, True, False, float("nan"), 1e300, -1.5]),
            lambda: chance.choice(NUMBERS),
            lambda: chance.choice(["", "x", "\u202e\x1b", "é" * 40, *NAMES]),
            lambda: chance.randbytes(chance.choice([0, 1, 8, 16, 300])),
        ]
        if depth < DEPTH_MAX:
            keys = ("a", "num_envs", "name", b"nd", b"type", 1, None)
            kinds += [
                lambda: [self._plain(depth + 1) for _ in range(count)],
                lambda: {key: self._plain(depth + 1) for key in chance.sample(keys, count)},
                lambda: msgpack.ExtType(chance.choice([*range(15), 99, 127]), packed(self._plain(depth + 1))),
            ]
        return chance.choice(kinds)()

    # --- control messages ---------------------------------------------------------------------------------------------

    def control_message(self) -> object:
        """Any message between hub and worker, with fields of the right types and any values."""
        return self._of(self.chance.choice(SAID if self.chance.random() < 0.95 else [*control.CONTROL.values()]))

    def _of(self, hint: Any) -> Any:
        chance = self.chance
        origin, inside = get_origin(hint), get_args(hint)
        if origin is list:
            return [self._of(inside[0]) for _ in range(chance.randrange(4))]
        if origin is dict:
            return {name: self._of(inside[1]) for name in chance.sample(NAMES, 2)}
        if inside:  # Optional
            return None if chance.random() < 0.3 else self._of(inside[0])
        plain: dict[Any, Callable[[], Any]] = {
            int: lambda: chance.choice([0, 1, 2, 3, chance.randrange(1 << 20), *NUMBERS[:8]]),
            bool: lambda: chance.random() < 0.5,
            str: lambda: chance.choice(["", "x", "builtins.ValueError", "\x1b[2J\u202e", "a" * 3000]),
            bytes: lambda: chance.choice([b"", self.value(), packed([[], {}]), codec.encode({"a": 1})]),
            Any: lambda: chance.choice([None, "<f8", [2], [1 << 40], -1, "|O", 1.5]),
        }
        if hint in plain:
            return plain[hint]()
        return hint(**{name: self._of(inner) for name, inner in get_type_hints(hint).items()})


def _joined(parts: dict[str, bytes]) -> bytes:
    """A map with these encoded values."""
    return b"\xde" + struct.pack(">H", len(parts)) + b"".join(packed(name) + value for name, value in parts.items())
