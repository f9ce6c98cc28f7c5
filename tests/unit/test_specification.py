"""PROTOCOL.md says what the code does: its session in bytes, its tables of messages, ops, limits and failures."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import zmq
from conformance.kit import client_cases
from envhub_client.connection import zeromq_transport
from envhub_server.config import HubConfig
from envhub_server.network import connections
from gymnasium import spaces as gym_spaces
from protocol_document import TEXT, marked, names, section, table, tables, titles

from envhub.arena import layout, memory
from envhub.env_failure import EnvFailure
from envhub.protocol import messages, prelude, validation
from envhub.protocol.client import AWAY_WARNING_S, CUTS_MAX, HEARTBEAT_S, REFUSED_S, SILENCE_WARNING_S
from envhub.protocol.hub import ENDED_MAX, LEASE_S, SESSIONS_MAX, HubProtocol
from envhub.protocol.messages import REPLIES, REQUESTS, Capacity, Failure, Faults, Hosting, Op, Recycle, Shared
from envhub.secret import Secret
from envhub.transport import sockets
from envhub.values import actions, codec, leaf, spaces
from envhub.values.leaf import Leaf

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/conformance/golden.json").read_text())
CODE = [path for folder in ("envhub", "server", "client") for path in (ROOT / folder).rglob("*.py")]


def test_session_in_bytes_is_that_of_the_golden_frames() -> None:
    blocks = re.findall(r"^```hex\n; (.*?)\n(.*?)^```", TEXT, re.M | re.S)
    shown = {
        name: bytes.fromhex("".join(line.partition(";")[0] for line in body.splitlines())) for name, body in blocks
    }
    golden = GOLDEN["session"].items()
    frames = {f"{name} {number}": frame for name, frames in golden for number, frame in enumerate(frames)}
    assert shown == {name: bytes.fromhex(frames[name]) for name in shown} and len(shown) > 6


# --- the tables -------------------------------------------------------------------------------------------------------


def test_version_of_the_specification_is_the_codes() -> None:
    assert TEXT.startswith(f"# The EnvHub protocol, version {prelude.VERSION}\n")


def test_prelude_is_described_field_by_field() -> None:
    rows = table("The prelude")
    sizes = [int(row[1]) for row in rows]
    assert [int(row[0]) for row in rows] == [sum(sizes[:number]) for number in range(len(sizes))]
    assert sum(sizes) == prelude.PRELUDE.size
    values = {row[2]: row[3] for row in rows}
    assert values["magic"].strip("`") == prelude.MAGIC.decode()
    assert int(values["version"]) == prelude.VERSION


def test_every_op_is_in_the_table_with_its_number() -> None:
    assert {row[1]: int(row[0]) for row in table("Ops")} == {op.name: int(op) for op in Op}


def test_every_request_belongs_to_one_level() -> None:
    levels = [name for row in table("Levels") for name in names(row[2])]
    assert sorted(levels) == sorted(op.name for op in Op if op in REQUESTS or op == Op.STEP)


def test_public_key_of_the_document_follows_from_its_secret_key() -> None:
    ((secret, public),) = re.findall(r"^\| `([0-9a-f]{64})` \| `([0-9a-f]{64})` \|$", TEXT, re.M)
    assert sockets.public_key(Secret(bytes.fromhex(secret))).hex() == public


def type_in_words(hint: Any) -> str:
    """The type of a field as the tables write it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Union:
        return f"{type_in_words(inner[0])} or nil"
    if origin is list:
        return f"list of {type_in_words(inner[0])}"
    if origin is dict:
        return "map" if inner[1] is Any else f"map of {type_in_words(inner[1])}"
    return "map" if dataclasses.is_dataclass(hint) else str(hint.__name__)


def default_in_words(field: dataclasses.Field[Any]) -> str:
    """A question mark behind the type of a field that may be left out, and its default unless that is empty."""
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return ""
    is_shown = isinstance(field.default, str | int | float) and field.default
    return f"? {json.dumps(field.default)}" if is_shown else "?"


INNER = {
    Capacity,
    Faults,
    Hosting,
    messages.ProgramOrigin,
    Recycle,
    Shared,
}  # messages inside of messages, and of the side socket
KINDS = {kind for kind in {*REQUESTS.values(), *REPLIES.values(), *INNER} if dataclasses.fields(kind)}


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_field_of_every_message_is_described_with_its_type_and_default(kind: type) -> None:
    hints = get_type_hints(kind)
    of_python = marked(section("Annex: Python")) if kind is messages.Make else []
    fields = [
        [field.name, type_in_words(hints[field.name]) + default_in_words(field)]
        for field in dataclasses.fields(kind)
        if field.name not in of_python
    ]
    assert [row[:2] for row in table(kind.__name__)] == fields


def test_every_op_has_its_messages_in_the_table() -> None:
    assert "Ops 16 to 27 belong to a session" in section("Ops")
    assert {op for op in Op if 16 <= op <= 27} == {*messages.SESSION_OPS}
    for number, name, request, reply in table("Ops"):
        op = Op(int(number))
        if op in REQUESTS:
            words = "empty map" if REQUESTS[op] is messages.Question else REQUESTS[op].__name__
            assert request.partition(",")[0].removesuffix("Request") == words.removesuffix("Request"), name
            assert reply.partition(",")[0] == REPLIES[op].__name__, name


def test_frames_of_replies_are_told_of_the_ops_that_have_some() -> None:
    *rows, (other, none) = table("Arrays")
    assert (other, none) == ("any other", "none")
    told = {op.partition(";")[0] for row in rows for op in names(row[0])}
    assert told == {row[1] for row in table("Ops") if "," in row[3]}
    for name, frames in [*GOLDEN["session"].items(), *GOLDEN["exchanges"].items()]:
        if name.endswith("reply") and len(frames) > 1:
            assert name.split()[0] in told, name


def test_autoreset_modes_are_the_codes() -> None:
    assert [row[0] for row in table("Autoreset")] == [*validation.REQUEST_CHOICES[messages.Make]["autoreset_mode"]]


def test_failure_of_an_env_is_described_key_by_key() -> None:
    hints = get_type_hints(EnvFailure)
    told = {row[0]: row[1] for row in table("Envs that fail")}
    assert told == {name: str(hint).replace(" | None", " or nil") for name, hint in as_words(hints).items()}


def as_words(hints: dict[str, Any]) -> dict[str, str]:
    return {name: hint.__name__ if isinstance(hint, type) else str(hint) for name, hint in hints.items()}


EXAMPLES = [
    gym_spaces.Box(0, 1, (2,), np.int32),
    gym_spaces.Discrete(2),
    gym_spaces.MultiDiscrete([2, 3]),
    gym_spaces.MultiBinary(2),
    gym_spaces.Dict({"a": gym_spaces.Discrete(2)}),
    gym_spaces.Tuple([gym_spaces.Discrete(2)]),
    gym_spaces.Text(4),
    gym_spaces.Sequence(gym_spaces.Discrete(2)),
    gym_spaces.Graph(gym_spaces.Box(0, 1, (1,)), None),
    gym_spaces.OneOf([gym_spaces.Discrete(2)]),
    spaces.Anything(),
]


def test_every_kind_of_space_is_described_with_its_fields() -> None:
    (rows,) = tables("Spaces")
    told = {marked(row[0])[0]: set(marked(row[1])) for row in rows}
    assert told.pop("Pickled") == {"value"}
    described = [spaces.describe(space) for space in EXAMPLES]
    assert set(told) == {each["space"] for each in described} == set(spaces._BUILD)
    for each in described:
        assert {*each} - {"space", "random"} == told[each["space"]], each["space"]


def test_what_a_refused_client_sees_are_codes_and_events_that_there_are() -> None:
    codes = {row[0] for row in table("Failure codes")}
    (rows,) = tables("What a refused client sees")
    for _, sees, _ in rows:
        for word in marked(sees):
            if word.isupper():
                assert hasattr(zmq, f"EVENT_{word}") or hasattr(zmq, f"PROTOCOL_ERROR_{word}"), word
            else:
                assert word in codes, word


def test_cases_of_a_client_are_the_codes() -> None:
    told = {row[0]: names(row[1]) for row in table("Testing a client")}
    assert [*told] == [*client_cases.LEVELS] and {*told} < {row[0] for row in table("Levels")}
    of_level = {level: [name for name, case in client_cases.CASES.items() if case.level == level] for level in told}
    assert told == of_level


def test_every_table_is_read_by_a_test() -> None:
    """By this module or by ``test_specification_of_states``, which name the section, or by a message's class."""
    sources = [Path(__file__), Path(__file__).with_name("test_specification_of_states.py")]
    read = {title for path in sources for title in re.findall(r'tables?\("([^"]+)"\)', path.read_text())}
    assert {title for title in titles() if tables(title)} == read | {kind.__name__ for kind in KINDS}
    assert [title for title in titles() if len(tables(title)) > 1] == ["Socket options"]  # its keys are read, too
    examples = re.findall(r"^```(\w*)\n(?=; )?", TEXT, re.M)
    assert {*examples} == {"", "hex", "sh", "text"}


def test_every_section_of_the_vectors_is_in_the_table() -> None:
    vectors = json.loads((ROOT / "tests/conformance/golden.json").read_text())
    assert {row[0].strip("`") for row in table("Vectors")} == vectors.keys()


def test_every_action_code_is_in_the_list() -> None:
    assert marked(section("Action codes"))[-len(actions.DTYPES) :] == [str(dtype) for dtype in actions.DTYPES]


def test_every_extension_type_is_in_the_table() -> None:
    names = ("TUPLE", "SET", "FROZENSET", "INTEGER", "COMPLEX", "MAPPING", "GENERATOR", "ARRAY", "REPR", "PICKLE")
    names += ("GRAPH", "SCALAR", "SPEC", "SPACE")
    assert {row[1]: int(row[0]) for row in table("Extension types")} == {name: getattr(codec, name) for name in names}


def test_every_failure_code_is_in_the_table_with_its_scope() -> None:
    used: set[tuple[str, str]] = set()
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            called = vars(node.func) if isinstance(node, ast.Call) else {}
            replaces = called.get("id") == "replace"  # a failure by one with another code
            if not isinstance(node, ast.Call) or not (replaces or "Failure" in (called.get("id"), called.get("attr"))):
                continue
            said = [each.value for each in node.keywords if each.arg in ("code", "scope")]
            parts = said if replaces else node.args[:2]
            if len(parts) == 2 and all(isinstance(part, ast.Constant) for part in parts):
                used.add((str(parts[0].value), str(parts[1].value)))  # type: ignore[attr-defined]
    worker = [path.read_text() for path in (ROOT / "server/envhub_server/worker").glob("*.py")]
    used |= {(code, "env") for text in worker for code in re.findall(r'"(env_raised|factory_failed)"', text)}
    snapshots = (ROOT / "server/envhub_server/session/snapshots.py").read_text()
    used |= {(code, "request") for code in re.findall(r'"(snapshot_\w+)"', snapshots)}
    listed = {(row[0], scope.strip(" `")) for row in table("Failure codes") for scope in row[1].split(",")}
    assert listed == used
    assert {scope for _, scope in listed} == {"request", "env", "session", "hub"}


UNUSED = {"unsupported_version", "stale_hub", "bad_seq", "session_lost"}  # by rules 2 to 4, and by the table
REFUSALS = [name for name, (*_, does) in GOLDEN["refusals"].items() if does not in ("runs", "dropped")]


def is_run_after(refused: list[bytes], prelude_of: prelude.Prelude) -> bool:
    """Whether a hub with the golden session runs a good request of this token and seq, once it got these messages."""
    half = HubProtocol(0x0123456789ABCDEF)
    made = half.receive(b"peer", 1, [bytes.fromhex(GOLDEN["session"]["MAKE request"][0])])
    assert made is not None
    half.answer(made, messages.Made(2, 1, [b""], b""))
    for frame in refused:
        half.receive(b"peer", 1, [frame])
    op, message = (Op.RESET, messages.Reset()) if prelude_of.token == made.token else (Op.MAKE, messages.Make(1))
    good = prelude.Prelude(op, half.hub_id, prelude_of.token, prelude_of.seq).pack() + messages.pack(message)
    return half.receive(b"peer", 1, [good]) is not None


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_message_uses_up_its_seq_as_the_document_says(name: str) -> None:
    frame, does = GOLDEN["refusals"][name]
    sent = prelude.Prelude.unpack(bytes.fromhex(frame))
    is_request = sent.op in messages.SESSION_OPS and sent.token != prelude.NO_SESSION
    uses_up = is_request and does not in UNUSED
    assert is_run_after([bytes.fromhex(frame)], sent) == (is_run_after([], sent) and not uses_up)


LIMITS = {
    "frames of a message": prelude.FRAMES_MAX,
    "bytes of a request's header, without the contents of bin values": codec.HEADER_BYTES_MAX,
    "items of all lists and maps of it": codec.HEADER_ITEMS_MAX,
    "items of another header": codec.KNOWN_HEADER_ITEMS_MAX,
    "lists and maps around an item of a header": codec.HEADER_DEPTH_MAX,
    "bytes of a frame to the hub": HubConfig().message_bytes_max,
    "sessions of a hub": HubConfig().sessions_max,
    "envs of a hub": HubConfig().max_envs,
    "envs of a session": HubConfig().envs_per_session_max,
    "leaves of a space": leaf.LEAVES_MAX,
    "items of a leaf, of one env": leaf.LEAF_ITEMS_MAX,
    "dimensions of a leaf": leaf.LEAF_DIMENSIONS_MAX,
    "bytes of a space's elements, of all envs": spaces.SPACE_BYTES_MAX,
    "spaces inside a space": spaces.SPACES_MAX,
    "items of a list or map in a value": codec.ITEMS_MAX,
    "keys of a MAPPING, items of a SET, neither str nor bin": codec.UNSALTED_KEYS_MAX,
    "bytes of a text": codec.STRING_BYTES_MAX,
    "containers around a value": codec.DEPTH_MAX,
    "dimensions of an array in a value": codec.NDIM_MAX,
    "ended sessions remembered": ENDED_MAX,
    "seconds of a lease": HubConfig().lease,
    "seconds for requests to end when the hub stops": HubConfig().drain_timeout,
}


def test_times_and_counts_in_the_text_are_the_codes() -> None:
    assert (HEARTBEAT_S, CUTS_MAX, connections.HELLO_S, connections.MALFORMED_MAX) == (1, 10, 10, 3)
    assert (REFUSED_S, prelude.RECONNECT_S, prelude.BEATS_MAX) == (5, 60, 3)
    assert SILENCE_WARNING_S < 4 and AWAY_WARNING_S < 4


def test_arena_is_the_codes() -> None:
    header = f"`magic` (`{memory.MAGIC.to_bytes(8, 'little').decode()}`), `version` ({memory.VERSION}), `rows`, `epoch`"
    assert header in " ".join(section("Shared").split())
    rows, info_bytes, flat = 3, 5, Leaf("<f4", (2, 2))
    fields = layout.Layout(rows, (flat,), (flat,), info_bytes).fields()
    cells = {row[0].replace("/i", "/0"): row[1] for row in table("The fields of the arena")}
    shown = {name: cell.replace("word", "int64, rows").split(", ", 1) for name, cell in cells.items()}
    assert list(shown) == list(fields)
    sizes = {"rows * items * 8": str(rows * 4 * 8), "rows * 10": str(rows * 10), "rows": str(rows)}
    for name, (dtype, shape) in shown.items():
        for word, size in {**sizes, "`info_bytes": str(info_bytes), "the leaf's shape": "2, 2"}.items():
            shape = shape.replace(word, size)
        assert fields[name].shape == tuple(map(int, shape.split(", "))), name
        assert fields[name].dtype == flat.dtype or np.dtype(fields[name].dtype) == np.dtype(dtype), name
        assert fields[name].offset % layout.ALIGNMENT == 0
    assert fields["request"].offset == layout.HEADER_BYTES == 4096


def test_limits_are_the_codes() -> None:
    assert {row[0]: float(row[1].replace(",", "")) for row in table("Limits")} == LIMITS
    assert HubConfig().sessions_max == SESSIONS_MAX and HubConfig().lease == LEASE_S


def options(side: Any, module: ModuleType, message_bytes_max: int) -> dict[str, str]:
    """Every option of a side's one socket, with the value of its expression: its own and those of both sides."""
    queue = module.RECEIVE_QUEUE_MESSAGES_MAX
    found = {}
    for place in (sockets.open_socket, side):
        names = {
            **vars(sockets),
            **vars(module),
            "message_bytes_max": message_bytes_max,
            "receive_queue_messages_max": queue,
        }
        for call in ast.walk(ast.parse(inspect.getsource(place))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "setsockopt":
                name, value = map(ast.unparse, call.args[:2])
                of_addresses = ("zmq.IPV6", "zmq.CURVE", "zmq.ZAP", "zmq.BACKLOG")
                if name.startswith(of_addresses) or ast.unparse(call.func.value) in (
                    "listening",
                    "monitor",
                    "stranger",
                ):
                    continue  # and not on the wire
                found[name.removeprefix("zmq.")] = str(eval(value, names))
    return found


def test_socket_options_are_the_codes() -> None:
    rows = table("Socket options")
    sides = (
        (sockets.Router, sockets, HubConfig().message_bytes_max),
        (zeromq_transport, zeromq_transport, prelude.FRAME_BYTES_MAX),
    )
    for (_, text), (side, module, message_bytes_max) in zip(rows, sides, strict=True):
        shown = dict(re.findall(r"`?(\w+)` ([^,]+)", text))
        if "IPC_FILTER_UID" in shown:
            assert shown.pop("IPC_FILTER_UID") == "the hub's own user"
            shown["IPC_FILTER_UID"] = str(os.getuid())
        assert shown == options(side, module, message_bytes_max)


def test_failure_fields_that_no_version_changes_are_still_there() -> None:
    assert [field.name for field in dataclasses.fields(Failure)][:3] == ["code", "scope", "message"]
