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

import numpy as np
import pytest
from envhub_client.connection import connection
from envhub_server.config import HubConfig, Limits, Timing
from envhub_server.hub import hub
from envhub_server.network import access, connections

from envhub.arena import layout
from envhub.protocol import hub as protocol_hub
from envhub.protocol import messages, prelude, validation
from envhub.protocol.hub import HubProtocol
from envhub.protocol.messages import REPLIES, REQUESTS, Failure, Op, Shared, World
from envhub.secret import Secret
from envhub.transport import sockets
from envhub.values import actions, codec, leaf, spaces
from envhub.values.leaf import Leaf

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "envhub/protocol/PROTOCOL.md").read_text()
GOLDEN = json.loads((ROOT / "tests/conformance/golden.json").read_text())
CODE = [path for folder in ("envhub", "server", "client") for path in (ROOT / folder).rglob("*.py")]


def section(title: str) -> str:
    """The text under a heading, up to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", TEXT, re.M | re.S)
    assert found is not None, f"no section {title!r}"
    return found[1]


def table(title: str) -> list[list[str]]:
    """The cells of a section's first table, without its head; code marks are taken off."""
    found = re.search(r"^\|.*\n\|[-| ]+\n((?:\|.*\n?)+)", section(title), re.M)
    assert found is not None, f"no table under {title!r}"
    return [[cell.strip().strip("`") for cell in line.strip("|\n").split("|")] for line in found[1].splitlines()]


# --- the session in bytes ---------------------------------------------------------------------------------------------


def test_session_in_bytes_is_that_of_the_golden_frames() -> None:
    blocks = re.findall(r"^```hex\n; (.*?)\n(.*?)^```", TEXT, re.M | re.S)
    shown = {
        name: bytes.fromhex("".join(line.partition(";")[0] for line in body.splitlines())) for name, body in blocks
    }
    golden = GOLDEN["session"].items()
    assert shown == {
        f"{name} {number}": bytes.fromhex(frame) for name, frames in golden for number, frame in enumerate(frames)
    }


# --- the tables -------------------------------------------------------------------------------------------------------


def test_version_of_the_specification_is_the_codes() -> None:
    assert TEXT.startswith(f"# The EnvHub protocol, version {prelude.VERSION[0]}.{prelude.VERSION[1]}\n")


def test_prelude_is_described_field_by_field() -> None:
    rows = table("The prelude")
    sizes = [int(row[1]) for row in rows]
    assert [int(row[0]) for row in rows] == [sum(sizes[:number]) for number in range(len(sizes))]
    assert sum(sizes) == prelude.PRELUDE.size
    values = {row[2]: row[3] for row in rows}
    assert values["magic"].strip("`") == prelude.MAGIC.decode()
    assert (int(values["major"]), int(values["minor"].split(";")[0])) == prelude.VERSION


def test_every_op_is_in_the_table_with_its_number() -> None:
    assert {row[1]: int(row[0]) for row in table("Ops")} == {op.name: int(op) for op in Op}


def names(cell: str) -> list[str]:
    """The names of a cell that are separated by commas."""
    return [name.strip(" `") for name in cell.split(",")]


def test_every_request_belongs_to_one_level() -> None:
    levels = [name for row in table("Levels") for name in names(row[2])]
    assert sorted(levels) == sorted(op.name for op in Op if op in REQUESTS or op == Op.STEP)
    titles = re.findall(r"^#+ (.*)$", TEXT, re.M)
    assert all(title in titles for row in table("Levels")[1:] for title in row[3].split("; "))


def test_changes_are_the_fields_that_say_since_when_they_are_there() -> None:
    since: dict[tuple[str, str], list[str]] = {}
    for part in re.split(r"^#+ ", TEXT, flags=re.M):
        for name, version in re.findall(r"^\| `(\w+)` \|.*?\| since (1\.\d)\.", part, re.M):
            since.setdefault((version, part.partition("\n")[0]), []).append(name)
    assert {(row[0], row[1]): names(row[2]) for row in table("Changes by minor version")} == since


def test_public_key_of_the_document_follows_from_its_secret_key() -> None:
    ((secret, public),) = re.findall(r"^\| `([0-9a-f]{64})` \| `([0-9a-f]{64})` \|$", TEXT, re.M)
    assert sockets.public_key(Secret(bytes.fromhex(secret))).hex() == public


def documented(kind: type) -> None:
    """Compare a message's table with its fields: names in order, and which of them may be missing."""
    fields = dataclasses.fields(kind)
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    required = [field.name for field in fields if (field.default, field.default_factory) == missing]
    rows = table(kind.__name__)
    assert [row[0] for row in rows] == [field.name for field in fields]
    assert [row[0] for row in rows if row[2] == "required"] == required


KINDS = {kind for kind in {*REQUESTS.values(), *REPLIES.values(), World, Shared} if dataclasses.fields(kind)}


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_field_of_every_message_is_described(kind: type) -> None:
    documented(kind)


def test_every_action_code_is_in_the_table() -> None:
    assert [(int(row[0]), row[1]) for row in table("Action codes")] == [
        (code, str(dtype)) for code, dtype in enumerate(actions.DTYPES)
    ]


def test_every_extension_type_is_in_the_table() -> None:
    names = ("TUPLE", "SET", "FROZENSET", "INTEGER", "COMPLEX", "MAPPING", "GENERATOR", "ARRAY", "REPR", "PICKLE")
    names += ("GRAPH", "SCALAR", "SPEC", "SPACE")
    assert {row[1]: int(row[0]) for row in table("Extension types")} == {name: getattr(codec, name) for name in names}


def test_every_failure_code_is_in_the_table_with_its_scope() -> None:
    used: set[tuple[str, str]] = set()
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            called = vars(node.func) if isinstance(node, ast.Call) else {}
            if not isinstance(node, ast.Call) or "Failure" not in (called.get("id"), called.get("attr")):
                continue
            parts = node.args[:2]
            if len(parts) == 2 and all(isinstance(part, ast.Constant) for part in parts):
                used.add((str(parts[0].value), str(parts[1].value)))  # type: ignore[attr-defined]
    worker = [path.read_text() for path in (ROOT / "server/envhub_server/worker").glob("*.py")]
    used |= {(code, "env") for text in worker for code in re.findall(r'"(env_raised|factory_failed)"', text)}
    listed = {(row[0], scope.strip(" `")) for row in table("Failure codes") for scope in row[1].split(",")}
    assert listed == used
    assert {scope for _, scope in listed} == {"request", "env", "session", "hub"}


def test_code_that_never_uses_up_a_seq_is_one_of_the_protocols_half() -> None:
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(protocol_hub))) if isinstance(node, ast.Call)]
    failures = [node.args[0] for node in calls if ast.unparse(node.func) == "Failure"]
    refused = {part.value for part in failures if isinstance(part, ast.Constant)} - {"refused"}  # of a request's fields
    assert {row[0] for row in table("Failure codes") if row[3] != "yes"} == refused


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
    cell = {row[0]: row[3] for row in table("Failure codes")}[does]
    is_request = sent.op in messages.SESSION_OPS and sent.token != prelude.NO_SESSION
    uses_up = is_request if does == "malformed" else cell == "yes"
    assert cell.startswith(("yes", "no")) and (does == "malformed") == cell.startswith("no, if the op")
    assert is_run_after([bytes.fromhex(frame)], sent) == (is_run_after([], sent) and not uses_up)


LIMITS = {
    "frames of a message": prelude.FRAMES_MAX,
    "header of a request, without the contents of its bin values": codec.HEADER_BYTES_MAX,
    "items of all lists and maps of a request's header": codec.HEADER_ITEMS_MAX,
    "items of all lists and maps of another header": codec.KNOWN_HEADER_ITEMS_MAX,
    "lists and maps around an item of a header": codec.HEADER_DEPTH_MAX,
    "an extension in a header": codec.HEADER_EXTENSION_BYTES_MAX,
    "one frame to the hub": Limits().message_bytes_max,
    "sessions of a hub": Limits().sessions_max,
    "envs of a hub": Limits().envs_max,
    "envs of a session": Limits().envs_per_session_max,
    "leaves of an observation or an action space": leaf.LEAVES_MAX,
    "items of one leaf, of one env": leaf.LEAF_ITEMS_MAX,
    "dimensions of one leaf": leaf.LEAF_DIMENSIONS_MAX,
    "elements of an observation or an action space, of all envs together": spaces.SPACE_BYTES_MAX,
    "spaces inside a space, with itself": spaces.SPACES_MAX,
    "elements of the spaces in one value (SPACE), together": codec.SPACES_BYTES_MAX,
    "shared memory of all sessions": Limits().arena_bytes_max,
    "ended sessions remembered": prelude.ENDED_MAX,
    "tokens remembered that were closed first": prelude.CLOSED_EARLY_MAX,
    "items of a list or map in a value": codec.ITEMS_MAX,
    "keys of one MAPPING, or items of one SET or FROZENSET, that are neither str nor bin": codec.UNSALTED_KEYS_MAX,
    "such keys or items of one hash in Python, where they are more than 8": codec.EQUAL_HASHES_MAX,
    "text in msgpack": codec.STRING_BYTES_MAX,
    "bytes in msgpack": codec.BYTES_MAX,
    "containers around a value": codec.DEPTH_MAX,
    "dimensions of an array in a value": codec.NDIM_MAX,
    "a REPR": codec.REPR_CHARS_MAX,
    "lease": Timing().lease_s,
    "envs to close": messages.Faults().close_s,
    "that a client may give envs to close": Limits().close_s_max,
    "requests to end when the hub stops": Timing().drain_s,
    "time to the first message of a connection": connections.HELLO_S,
    "messages of a connection that cannot be read": connections.MALFORMED_MAX,
    "time for a client with too many connections to read why": access.REFUSED_S,
    "connections in a row that end after a request was sent on them": prelude.CUTS_MAX,
    "heartbeat": prelude.HEARTBEAT_S,
    "beats that do not come": prelude.BEATS_MAX,
    "silence before a client warns": prelude.SILENCE_WARNING_S,
    "time without a connection before a client warns": prelude.AWAY_WARNING_S,
    "refused connections before the hub is lost": prelude.REFUSED_S,
    "out of reach before the hub is lost": prelude.RECONNECT_S,
}


def number(text: str) -> int:
    base, _, power = text.replace(",", "").partition("^")
    exponent, _, less = power.partition(" - ")
    return (-1 if base < "0" else 1) * abs(int(base)) ** int(exponent or 1) - int(less or 0)


def test_bounds_of_numbers_are_the_codes() -> None:
    shown = {(row[0], row[1]): (number(row[2]), number(row[3])) for row in table("Bounds of numbers")}
    assert shown == {
        (kind.__name__, name): bounds
        for kind, fields in validation.REQUEST_BOUNDS.items()
        for name, bounds in fields.items()
    }


def test_texts_of_fixed_sets_are_the_codes() -> None:
    shown = {
        (row[0], row[1]): [text.replace("empty", "") for text in names(row[2])] for row in table("Texts of fixed sets")
    }
    assert shown == {
        (kind.__name__, name): list(texts)
        for kind, fields in validation.REQUEST_CHOICES.items()
        for name, texts in fields.items()
    }


def test_arena_is_the_codes() -> None:
    assert [row[0] for row in table("The header of the arena")] == list(layout.HEADER_WORDS)
    values = {row[0]: row[1] for row in table("The header of the arena")}
    assert int(values["version"]) == layout.VERSION
    assert layout.MAGIC.to_bytes(8, "little").decode() in values["magic"]
    rows, info_bytes, flat = 3, 5, Leaf("<f4", (2, 2))
    fields = layout.Layout(rows, (flat,), (flat,), info_bytes).fields()
    shown = {row[0].replace("/i", "/0"): row[1:3] for row in table("The fields of the arena")}
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
    found = {row[0]: float(row[1].replace(",", "")) for row in table("Limits")}
    assert {name: found.get(name) for name in LIMITS} == {name: float(limit) for name, limit in LIMITS.items()}
    assert Limits().sessions_max == prelude.SESSIONS_MAX and Timing().lease_s == prelude.LEASE_S


def options(module: ModuleType, message_bytes_max: int) -> dict[str, str]:
    """Every option of a side's one socket, with the value of its expression: its own and those of both sides."""
    queue = module.RECEIVE_QUEUE_MESSAGES_MAX
    found = {}
    for place in (sockets, module):
        names = {**vars(place), "message_bytes_max": message_bytes_max, "receive_queue_messages_max": queue}
        for call in ast.walk(ast.parse(inspect.getsource(place))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "setsockopt":
                name, value = map(ast.unparse, call.args)
                of_addresses = ("zmq.IPV6", "zmq.CURVE", "zmq.ZAP")
                if name.startswith(of_addresses) or ast.unparse(call.func.value) in ("monitor", "stranger"):
                    continue  # and not on the wire
                found[name.removeprefix("zmq.")] = str(eval(value, names))
    return found


def test_socket_options_are_the_codes() -> None:
    rows = table("Socket options")
    sides = ((1, hub, HubConfig().limits.message_bytes_max), (2, connection, prelude.FRAME_BYTES_MAX))
    for column, module, message_bytes_max in sides:
        shown = {row[0]: row[column] for row in rows if row[column] != "default"}
        if "IPC_FILTER_UID" in shown:
            assert shown.pop("IPC_FILTER_UID") == "the hub's own user"
            shown["IPC_FILTER_UID"] = str(os.getuid())
        assert shown == options(module, message_bytes_max)


def test_failure_fields_that_no_version_changes_are_still_there() -> None:
    assert [field.name for field in dataclasses.fields(Failure)][:3] == ["code", "scope", "message"]
