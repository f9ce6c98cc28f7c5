from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from envhub_client.session.options import CrashPolicy, FaultOptions, InvalidPolicy, Policy
from envhub_server.ipc import control
from envhub_server.processes.worker_handle import BOUNDS

from envhub.protocol import messages
from envhub.protocol.hub import FIRST_OPS, HubProtocol
from envhub.protocol.messages import REPLY, REQUESTS, Failure, Faults, Hosting, Make, Op, ProgramOrigin, Recycle
from envhub.protocol.prelude import PRELUDE, Prelude
from envhub.protocol.validation import (
    FAILURE_CHARS_MAX,
    REQUEST_BOUNDS,
    REQUEST_CHOICES,
    TEXT_CHARS_MAX,
    OutOfBounds,
    check,
    shorten_texts,
)

HUB_ID = 7


def test_texts_of_a_hub_are_shortened_and_those_of_an_env_that_raised_less() -> None:
    short, long = Failure("refused", "request", "no", log_tail="-"), "x" * 10**6
    assert shorten_texts(short) is short
    refused = shorten_texts(replace(short, message=long, log_tail=long))
    assert (len(refused.message), len(refused.log_tail)) == (TEXT_CHARS_MAX, TEXT_CHARS_MAX)
    raised = shorten_texts(Failure("env_raised", "env", long, traceback=long, log_tail=long))
    assert (len(raised.message), len(raised.traceback)) == (FAILURE_CHARS_MAX, FAILURE_CHARS_MAX)
    assert len(raised.log_tail) == TEXT_CHARS_MAX


def kind_of_number(hint: Any) -> type | None:
    """``int`` or ``float`` where a field holds one, or a list of them, or may."""
    if get_origin(hint) in (Union, list):
        return next((found for part in get_args(hint) if (found := kind_of_number(part))), None)
    return hint if hint in (int, float) else None


def numeric(kind: type) -> dict[str, type]:
    """The fields of a message that hold numbers, with their kind."""
    found = {name: kind_of_number(hint) for name, hint in get_type_hints(kind).items()}
    return {name: number for name, number in found.items() if number is not None}


KINDS = {*REQUESTS.values(), Faults, Hosting, ProgramOrigin, Recycle}
FIELDS = [(kind, name, number) for kind in KINDS for name, number in numeric(kind).items()]
FIELDS.sort(key=lambda field: (field[0].__name__, field[1]))
OPS = {kind: op for op, kind in REQUESTS.items()}
HINTS = {kind: get_type_hints(kind) for kind in KINDS}


def test_every_number_of_every_request_has_finite_bounds() -> None:
    assert {kind: set(fields) for kind, fields in REQUEST_BOUNDS.items()} == {
        kind: set(numeric(kind)) for kind in KINDS if numeric(kind)
    }
    assert all(-math.inf < low < high < math.inf for fields in REQUEST_BOUNDS.values() for low, high in fields.values())


def test_every_number_in_a_workers_messages_has_bounds() -> None:
    said = [kind for kind in control.CONTROL.values() if (kind.__doc__ or "").startswith("Worker to hub")]
    wanted = {kind: set(numeric(kind)) for kind in {*said, Failure} if numeric(kind)}
    del wanted[control.Born]  # it is said before any env is made
    assert {kind: set(fields) for kind, fields in BOUNDS.items()} == wanted
    assert {control.Building, control.RowInfo, Failure} <= wanted.keys()


def test_every_message_inside_a_request_is_checked() -> None:
    inside = {hint for kind in KINDS for hint in HINTS[kind].values() if dataclasses.is_dataclass(hint)}
    assert {kind for kind in inside if numeric(kind)} <= REQUEST_BOUNDS.keys() & KINDS


def example(kind: type, name: str, number: Any) -> Any:
    """A message with this number in this field, and otherwise as sensible as can be."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if (field.default, field.default_factory) == (dataclasses.MISSING, dataclasses.MISSING):
            low = REQUEST_BOUNDS.get(kind, {}).get(field.name, (0, 0))[0]
            empty = {int: low, str: "", bytes: b"", bool: False}
            values[field.name] = empty.get(HINTS[kind][field.name], [])
    values[name] = [number] if get_origin(HINTS[kind][name]) is list else number
    found = kind(**values)
    if kind is Recycle:
        return replace(Make(1), hosting=Hosting(recycle=found))
    if kind is ProgramOrigin:
        return replace(Make(1), origin=found)
    if kind is Hosting:
        return replace(Make(1), hosting=found)
    return replace(Make(1), faults=found) if kind is Faults else found


def edges(low: float, high: float, kind: type) -> tuple[list[Any], list[Any]]:
    """The last numbers that are accepted, and the first that are refused."""
    if kind is int:
        return [low, high], [low - 1, high + 1, -(1 << 300), 1 << 300]
    beyond = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf)]
    return [float(low), float(high)], [*beyond, -math.inf, math.inf, math.nan]


@pytest.mark.parametrize(("kind", "name", "number"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_bounds_themselves_are_accepted_and_the_next_numbers_are_not(kind: type, name: str, number: type) -> None:
    accepted, beyond = edges(*REQUEST_BOUNDS[kind][name], number)
    for sensible in accepted:
        assert answered(example(kind, name, sensible)) is None
    for wrong in beyond:
        assert_refused(kind, name, wrong)


def assert_refused(kind: type, name: str, wrong: Any) -> None:
    refused = answered(example(kind, name, wrong))
    assert refused is not None and refused.code == "refused" and f"{kind.__name__}.{name} is " in refused.message
    with pytest.raises(OutOfBounds):
        check(example(kind, name, wrong))


def answered(message: Any) -> Failure | None:
    """What a hub's half of the protocol refuses a request with, if it does; as the first of its session, or any."""
    hub = HubProtocol(HUB_ID)
    op, token, seq = OPS[type(message)], bytes(range(16)), 1
    if op in messages.SESSION_OPS and op not in FIRST_OPS:
        made = hub.receive(b"peer", 1, [Prelude(Op.MAKE, HUB_ID, token, seq).pack() + messages.pack(Make(1))])
        assert made is not None
        hub.fail(made, Failure("internal", "hub", "so that the next one may come"))
        hub.outgoing.clear()
        seq = 2
    incoming = hub.receive(b"peer", 1, [Prelude(op, HUB_ID, token, seq).pack() + messages.pack(message)])
    if incoming is not None:
        assert incoming.message == message and not hub.outgoing
        return None
    ((_, (reply,)),) = hub.outgoing
    assert Prelude.unpack(reply).op == REPLY | Op.FAILURE
    return messages.unpack(Failure, reply[PRELUDE.size :])


def test_refused_make_is_no_session() -> None:
    hub = HubProtocol(HUB_ID)
    for seq, heartbeat_s in ((1, math.nan), (2, 1.0)):
        frame = Prelude(Op.MAKE, HUB_ID, bytes(range(16)), seq).pack() + messages.pack(Make(1, heartbeat_s=heartbeat_s))
        found = hub.receive(b"peer", 1, [frame])
        assert (found is not None) == (heartbeat_s == 1.0)


def test_what_a_client_may_set_a_hub_accepts() -> None:
    check(replace(Make(1), faults=FaultOptions().wire()))
    most = FaultOptions(step_timeout=7 * 24 * 3600, restarts_max=1_000_000, restart_wait=0.0, close_timeout=0.001)
    check(replace(Make(1), faults=most.wire()))


CHOICES = [(kind, name) for kind, fields in REQUEST_CHOICES.items() for name in fields]


@pytest.mark.parametrize(("kind", "name"), CHOICES, ids=lambda part: getattr(part, "__name__", part))
def test_text_is_accepted_if_it_is_one_of_the_fields_and_refused_by_name_otherwise(kind: type, name: str) -> None:
    for text in REQUEST_CHOICES[kind][name]:
        assert answered(example(kind, name, text)) is None
    for wrong in ("Truncate", "none", "x" * 1000):
        assert_refused(kind, name, wrong)


def test_policies_of_a_client_are_those_that_a_hub_accepts() -> None:
    others = {"on_invalid": InvalidPolicy, "on_crash": CrashPolicy}
    policies = {name: others.get(name, Policy) for name in REQUEST_CHOICES[Faults]}
    assert {name: set(get_args(hint)) for name, hint in policies.items()} == {
        name: set(texts) for name, texts in REQUEST_CHOICES[Faults].items()
    }


def test_id_of_an_order_is_short_for_hubs_keep_it() -> None:
    check(messages.Operate("end", bytes(16)))
    with pytest.raises(OutOfBounds, match="17 bytes"):
        check(messages.Operate("end", bytes(17)))


@pytest.mark.parametrize("text", ["x" * 101, "two\nlines", "\x1b[31m"])
def test_texts_of_a_client_about_itself_are_short_lines(text: str) -> None:
    check(ProgramOrigin(label="x" * 100, pid=7))
    with pytest.raises(OutOfBounds, match="a text of ProgramOrigin"):
        check(ProgramOrigin(label=text))
