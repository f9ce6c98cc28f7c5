"""The table of the stimuli that each phase of a session handles, and of the phases that may follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Generic, NamedTuple, TypeVar

from envhub.protocol import messages
from envhub_server.ipc import control
from envhub_server.processes.worker_events import WorkerExited
from envhub_server.session import client_handlers as client
from envhub_server.session import making_handlers as making
from envhub_server.session import process_handlers as process
from envhub_server.session import request_handlers as request
from envhub_server.session import stimuli
from envhub_server.session.instructions import Instructions
from envhub_server.session.phases import MAKING, SERVING, Phase
from envhub_server.session.slots import Process
from envhub_server.session.state import SessionState

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
Following = Mapping[Phase, tuple[Phase, ...]]  # by phase, the other phases that may follow
Handler = Callable[..., Instructions]


class Rule(NamedTuple):
    """The handling of a kind of stimulus in one phase.

    Attributes:
        handler: the function that decides.
        following: the other phases that may follow.
    """

    handler: Handler
    following: tuple[Phase, ...]


class Rules(Generic[M_contra]):
    """Handler of a kind of stimulus in some phases."""

    def __init__(self, handler: Handler, following: Following) -> None:
        self.by_phase = {phase: Rule(handler, others) for phase, others in following.items()}


def _to(phases: Collection[Phase], *following: Phase) -> Following:
    return dict.fromkeys(phases, following)


def _by(handler: Callable[[SessionState, M, float], Instructions], following: Following) -> Rules[M]:
    return Rules(handler, following)


def _asked(handler: Callable[[SessionState, M, bool, float], Instructions], following: Following) -> Rules[M]:
    """Rules of a request; the handler gets ``quiescent``."""
    return Rules(handler, following)


def _said(handler: Callable[[SessionState, Process, M, float], Instructions], following: Following) -> Rules[M]:
    """Rules of a message of a process that serves a slot; with ``state`` any process may send it."""
    return Rules(handler, following)


def _row(kind: type[M], *rules: Rules[M]) -> tuple[type, dict[Phase, Rule]]:
    by_phase: dict[Phase, Rule] = {}
    for each in rules:
        by_phase |= each.by_phase
    return kind, by_phase


def _request(
    kind: type[M], handler: Callable[[SessionState, M, bool, float], Instructions], *following: Phase
) -> tuple[type, dict[Phase, Rule]]:
    """A request that is executed in READY; while it is pending the protocol admits only CLOSE."""
    broken, closing = _to([_P.BROKEN]), _to([_P.CLOSING])
    refused = _asked(request.on_broken_request, broken), _asked(request.on_closing_request, closing)
    return _row(kind, _asked(handler, _to([_P.READY], *following)), *refused)


_P = Phase
_LIVE = (*MAKING, *SERVING, _P.BROKEN, _P.CLOSING)
_GONE = (_P.BROKEN, _P.CLOSING)
_ENDING = {  # at once if no process is left
    **_to(MAKING, _P.CLOSING),
    **_to([*SERVING, _P.BROKEN], _P.CLOSING, _P.ENDED),
    **_to([_P.CLOSING]),
}
_CALLED = {**_to(SERVING), **_to([_P.CALLING], _P.READY)}
_EXITED = {
    **_to(MAKING, _P.CLOSING, _P.ENDED),
    **_to([_P.READY, _P.MOVING], _P.BROKEN),
    **_to([_P.CALLING], _P.READY, _P.BROKEN),
    **_to([_P.BROKEN]),
    **_to([_P.CLOSING], _P.ENDED),
}
_NOT_STARTED = {
    **_to(MAKING, _P.CLOSING, _P.ENDED),
    **_to(SERVING, _P.BROKEN),
    **_to([_P.BROKEN]),
    **_to([_P.CLOSING], _P.ENDED),
}

# In a draining hub, CLOSING or ENDED may follow every stimulus that leaves the session idle.
TABLE: Mapping[type, Mapping[Phase, Rule]] = dict(
    [
        # Stimuli of the client and the hub.
        _row(stimuli.SessionMade, _by(making.on_made, _to([_P.BUILDING]))),
        _request(messages.Step, request.on_step, _P.MOVING),
        _request(messages.Reset, request.on_reset, _P.MOVING),
        _request(messages.Call, request.on_call, _P.CALLING),
        _request(messages.SetAttr, request.on_set_attr, _P.CALLING),
        _request(messages.Send, request.on_send),
        _request(messages.Receive, request.on_receive),
        _request(messages.Collect, request.on_collect),
        _request(messages.TemplatesRequest, request.on_templates),
        _row(messages.Close, _asked(client.on_close, _ENDING)),
        _row(stimuli.Attached, _by(client.on_attached, _to(_LIVE))),
        _row(stimuli.AttachGivenUp, _by(client.on_attach_given_up, _to(_LIVE))),
        _row(stimuli.SideConnected, _by(client.on_side_connected, _to(_LIVE))),
        _row(stimuli.SideClosed, _by(client.on_side_closed, _to(_LIVE))),
        _row(stimuli.LeaseExpired, _by(client.on_lease_expired, _ENDING)),
        _row(stimuli.Draining, _by(client.on_draining, _ENDING)),
        _row(stimuli.Abandoned, _by(client.on_abandoned, _ENDING)),
        # Results of instructions.
        _row(stimuli.WorkersNotStarted, _by(process.on_not_started, _NOT_STARTED)),
        _row(
            stimuli.ArenaRefused,
            _by(making.on_arena_refused, _to([_P.MAPPING], _P.CLOSING)),
            _by(process.on_nothing, _to([_P.CLOSING])),
        ),
        _row(stimuli.ActionsRefused, _by(request.on_actions_refused, {**_to(_LIVE), **_to([_P.MOVING], _P.READY)})),
        _row(stimuli.PartPosted, _by(request.on_part_posted, _to(_LIVE))),
        _row(stimuli.PartDone, _by(request.on_part_done, _to(_LIVE))),
        _row(
            stimuli.StandInFailed,
            _by(process.on_stand_in_failed, _to(SERVING)),
            _by(process.on_nothing, _to(_GONE)),
        ),
        _row(stimuli.StandInInfo, _by(process.on_stand_in_info, _to(_LIVE))),
        _row(stimuli.RowsWaiting, _by(process.on_rows_waiting, _to(_LIVE))),
        # Stimuli of the arena and of time.
        _row(
            stimuli.RowsDone,
            _by(process.on_nothing, _to(_LIVE)),
            _by(request.on_rows_done, _to([_P.MOVING], _P.READY)),
        ),
        _row(
            stimuli.Elapsed,
            _by(process.on_elapsed, _to([*MAKING, *SERVING])),
            _by(process.on_elapsed_over, _to(_GONE)),
        ),
        # Messages of processes. Phases without a rule ignore a message: it was sent before the process learned of the
        # phase.
        _row(WorkerExited, _by(process.on_exited, _EXITED)),
        _row(control.Building, _said(making.on_building, _to([_P.BUILDING, *SERVING]))),
        _row(control.Imported, _said(making.on_imported, _to([_P.BUILDING]))),
        _row(control.FirstBuilt, _said(making.on_first_built, _to([_P.BUILDING]))),
        _row(
            control.Built,
            _said(process.on_built_again, _to(SERVING)),
            _said(making.on_built, _to([_P.BUILDING], _P.MAPPING, _P.CLOSING)),
        ),
        _row(
            control.Mapped,
            _said(process.on_mapped, _to(SERVING)),
            _said(making.on_first_mapped, _to([_P.MAPPING], _P.READY)),
        ),
        _row(control.RowInfo, _said(process.on_row_info, _to(SERVING))),
        _row(control.InfoTemplate, _said(process.on_template, _to(SERVING))),
        _row(
            control.RowFailed,
            _said(making.on_making_failed, _to(MAKING, _P.CLOSING)),
            _said(process.on_row_failed, _to(SERVING)),
            _said(process.on_closing_failed, _to([_P.CLOSING])),
        ),
        _row(control.CallResults, _said(request.on_call_answered, _CALLED)),
        _row(control.CallFailed, _said(request.on_call_answered, _CALLED)),
        _row(control.SharedChanged, _said(process.on_shared_changed, _to(_LIVE))),
        _row(control.Faulted, _said(process.on_faulted, _to(SERVING, _P.BROKEN))),
        _row(control.EpisodesDone, _said(process.on_episodes_done, _to(SERVING))),
        _row(control.Left, _said(process.on_left, _to(SERVING))),
        _row(control.Closing, _said(process.on_closing, _to(_LIVE))),
        _row(control.Suspicious, _said(process.ignore, _to(_LIVE))),
    ]
)


def diagram() -> str:
    """The transitions between two phases and the stimuli that may cause them, as a Mermaid state diagram."""
    edges: dict[tuple[str, str], list[str]] = {}
    for kind, rules in TABLE.items():
        for phase, rule in rules.items():
            for other in rule.following:
                edges.setdefault((phase.name, other.name), []).append(kind.__name__)
    lines = [f"    {before} --> {after}: {', '.join(kinds)}" for (before, after), kinds in sorted(edges.items())]
    return "\n".join(["stateDiagram-v2", "    [*] --> BUILDING", *lines, "    ENDED --> [*]"])
