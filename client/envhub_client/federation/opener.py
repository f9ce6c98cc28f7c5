"""Sessions that have the rows of a vector env: their division among hubs, their opening and their end."""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from envhub import errors
from envhub.protocol.messages import Capacity, Made, Make
from envhub.secret import Secret
from envhub.values import spaces
from envhub.vector_errors import SessionClosed
from envhub_client.connection.connection import CONNECT_TIMEOUT_S, Connection
from envhub_client.connection.known_hubs import Hubs, Member, all_members
from envhub_client.deadline import ANSWER_S, Deadline
from envhub_client.federation.part import LOOK_S, SILENCE_S_MIN, HubPart, while_in_reach
from envhub_client.session.description import SessionDescription, ValueCodec
from envhub_client.session.maker import SessionMaker, begun_connection, end_sessions
from envhub_client.session.options import SessionOptions
from envhub_client.session.session import SeedsGiven

REBUILD_ANSWER_S = 2.0  # for a hub to say that it is there, before envs are made again there

RowsMake = Callable[[range], Make]  # the request for these rows

log = logging.getLogger("envhub")


class OpenHub(NamedTuple):
    """A hub to which there is a connection, without a session as yet."""

    member: Member
    connection: Connection


def _await_end(connection: Connection, timeout: float | None) -> None:
    """Wait for the end of the session; errors as for ``Connection.result``, and ``HubLost`` if it is out of reach."""
    while_in_reach(lambda: [connection], SILENCE_S_MIN, timeout, connection.result)


class PartsOpener:
    """Opens the sessions of a vector env, and ends them; without ``hubs``, on the private hub."""

    def __init__(self, hubs: Hubs | None, make: RowsMake, options: SessionOptions, is_only_hub: bool) -> None:
        """Without ``options.split`` and ``options.hub_index`` the free CPUs say how many rows each hub gets.

        ``is_only_hub``: all rows are always on the one hub, and if that does not let the program in, there is no other.
        """
        self._hubs, self.is_only_hub = hubs, is_only_hub
        self.options, self.values, self.seeds = options, ValueCodec(allow_pickle=hubs is None), SeedsGiven()
        self._make = make
        # Every one that may have a session of ours, and the name of its hub.
        self._connections: dict[Connection, str] = {}
        self._lock = threading.Lock()
        self.closed = False
        self.stopped = False  # once nothing is to be made again, since the envs are wanted no more

    def hubs(self) -> Sequence[Member]:
        """The hubs that may have envs now, from that of ``hub_index`` on; errors as for ``all_members``."""
        hubs = [Member("the private hub", "")] if self._hubs is None else all_members(self._hubs)
        first = (self.options.hub_index or 0) % len(hubs)
        return [*hubs[first:], *hubs[:first]]

    def _address_of(self, hub: Member) -> str | Secret[str] | None:
        return None if self._hubs is None else hub.address

    def open(self, num_envs: int) -> list[HubPart]:
        """Open the first sessions; errors as for ``FederatedSession``."""
        hubs = self.hubs()
        if self.is_only_hub:
            return self.parts(self.connect(hubs, CONNECT_TIMEOUT_S), [num_envs], 0)
        if self.options.hub_index is not None:
            return self._on_first_that_serves(hubs, num_envs)
        split = self.options.split
        counts = None if split is None else checked_split(split, num_envs, len(hubs))
        connected = self.connect(hubs, CONNECT_TIMEOUT_S)
        return self.parts(connected, counts or room_for(num_envs, connected), 0)

    def _on_first_that_serves(self, hubs: Sequence[Member], num_envs: int) -> list[HubPart]:
        """Open one session, on the first of these hubs that can be reached and does not drain."""
        for hub in hubs[:-1]:
            try:
                return self.parts(self.connect([hub], ANSWER_S), [num_envs], 0)
            except errors.HubUnreachable as error:
                log.warning("%s; the envs are made on the next hub", error)
                self.end([*self._connections])
        return self.parts(self.connect([hubs[-1]], CONNECT_TIMEOUT_S), [num_envs], 0)

    def connect(
        self, hubs: Sequence[Member], timeout: float, failures: list[errors.EnvHubError] | None = None
    ) -> list[OpenHub]:
        """Connect to these hubs, all at the same time; an error is raised, or put among ``failures``, in that order."""
        begun = [(hub, self._begun(hub, timeout)) for hub in hubs]
        connected = []
        for hub, connection in begun:
            try:
                connected.append(OpenHub(hub, self._answered(connection)))
            except errors.EnvHubError as error:
                if failures is None:
                    raise
                failures.append(error)
        return connected

    def _begun(self, hub: Member, timeout: float) -> Connection | errors.EnvHubError:
        try:
            connection = begun_connection(self._address_of(hub), timeout, self.options.reconnect_timeout)
        except errors.EnvHubError as error:
            return error
        with self._lock:
            self._connections[connection] = hub.name
            closed = self.closed
        if closed:
            self.end([connection])
            raise SessionClosed("the vector env was closed meanwhile")
        return connection

    def _answered(self, begun: Connection | errors.EnvHubError) -> Connection:
        if isinstance(begun, errors.EnvHubError):
            raise begun
        try:
            begun.await_hub()
            with self._lock:
                check_distinct(self._connections)
            return begun
        except Exception:
            self.end([begun])
            raise

    def parts(
        self,
        hubs: Sequence[OpenHub],
        counts: Sequence[int],
        first: int,
        again: bool = False,
        num_workers: int | None = None,
    ) -> list[HubPart]:
        """Open a session on each of these hubs, for as many rows as ``counts`` says, from ``first`` on.

        All are asked before one is waited for. ``again`` if their session was lost; ``num_workers`` processes host all
        of these rows. Raises the error of the first hub, or ``SessionLost`` once the envs are not wanted any more.
        """
        makers: list[tuple[str, range, SessionMaker]] = []
        processes = processes_of(self.options.num_workers if num_workers is None else num_workers, counts)
        for hub, count, own_workers in zip(hubs, counts, processes, strict=True):
            if not count:
                self.end([hub.connection])
                continue
            rows = range(first, first + count)
            first += count
            options = replace(self.options, num_workers=own_workers)
            maker = SessionMaker(self._address_of(hub.member), self._make(rows), options)
            maker.keeps_last = True  # a reset may leave out all rows of a hub
            connection = hub.connection
            maker.begin(connection, seeds=self.seeds.first_seeds(rows) if again else None)
            name = (connection.hub or errors.hub_at(connection.address)) if self.is_only_hub else hub.member.name
            makers.append((name, rows, maker))
        lanes = [maker.describe(self._made(maker)) for _, _, maker in makers]
        check_agreement([(maker.connection, maker.description) for _, _, maker in makers], self.options)
        return [HubPart(name, rows, maker, lane) for (name, rows, maker), lane in zip(makers, lanes, strict=True)]

    def _made(self, maker: SessionMaker) -> Made:
        while not self.stopped:
            with suppress(errors.HubTimeout):
                return maker.made(LOOK_S)
        raise errors.SessionLost("the envs are wanted no more")

    def end(
        self,
        connections: Sequence[Connection],
        terminate: bool = True,
        deadline: Deadline | None = None,
        wait: Callable[[Connection, float | None], object] = _await_end,
    ) -> None:
        """End these sessions and connections, unless that was done; by default only hubs in reach are waited for."""
        with self._lock:
            ours = [each for each in connections if each in self._connections]
        end_sessions(ours, terminate, deadline, wait)
        with self._lock:
            for each in ours:
                self._connections.pop(each, None)

    def open_again(
        self,
        lost: HubPart,
        gone: Sequence[HubPart],
        num_workers: int | None,
        check: Callable[[HubPart], None],
        deadline: Deadline,
    ) -> Sequence[HubPart]:
        """Open and ``check`` sessions for the rows of a lost part, in place of those that are gone, or leave none."""
        timeout = min(CONNECT_TIMEOUT_S, max(1.0, deadline.left_s())) if self.is_only_hub else REBUILD_ANSWER_S
        failures: list[errors.EnvHubError] = [errors.HubUnreachable(f"the name leads to the hub {lost.hub} no more")]
        for members in self._choices(lost):
            hubs = self.connect(members, timeout, failures)
            try:
                if self.is_only_hub or any(hub.member.name == lost.hub for hub in hubs):  # it may have no room for both
                    with suppress(errors.ConnectionInUse):  # an interrupt may have left it so
                        self.end([part.connection for part in gone])
                if hubs:
                    # The envs of a vector env are one: on one hub, by as many workers.
                    on_one = len(hubs) == 1 or lost.maker.description.vector or self.options.hub_index is not None
                    counts = (roomiest if on_one else room_for)(len(lost.rows), hubs)
                    parts = self.parts(hubs, counts, lost.rows.start, True, num_workers)
                    for part in parts:
                        check(part)
                    return parts
            except Exception as error:
                self.end([hub.connection for hub in hubs])
                if not isinstance(error, errors.EnvHubError):  # such as of an env
                    raise
                failures.append(error)
        raise next((each for each in failures if not isinstance(each, errors.HubUnreachable)), failures[-1])

    def _choices(self, lost: HubPart) -> list[list[Member]]:
        """Hubs that may have the rows; the lost one only where no others have them: it may not come back."""
        members = self.hubs()
        if self.is_only_hub:
            return [[*members]]
        others = [member for member in members if member.name != lost.hub]
        same = [member for member in members if member.name == lost.hub]
        return [others, same] if self.options.on_hub_loss == "redistribute" else [same]

    def end_later(self, gone: Sequence[HubPart]) -> None:
        """End sessions in whose place are others; of a hub that is out of reach, until this is ``stopped``."""

        def wait(connection: Connection, timeout: float | None) -> None:
            while not self.stopped:
                with suppress(errors.HubTimeout):
                    connection.result(LOOK_S)
                    return

        while True:
            try:
                self.end([part.connection for part in gone], wait=wait)
                return
            except errors.ConnectionInUse:  # by the program's thread, for an instant
                if self.stopped:
                    return
                time.sleep(LOOK_S)

    def end_all(self, terminate: bool = True, deadline: Deadline | None = None) -> None:
        """End all sessions, and open none any more."""
        with self._lock:
            self.closed = True
        # The envs of an only hub close in peace also where that is silent for a while, as those of any session.
        self.end([*self._connections], terminate, deadline, Connection.result if self.is_only_hub else _await_end)


def check_distinct(hubs: Mapping[Connection, str]) -> None:
    """Raise ``AddressError`` where two names stand for the same hub, of those that have answered."""
    names: dict[int, str] = {}
    for connection, name in hubs.items():
        hub_id = connection.protocol.hub_id
        if hub_id and (first := names.setdefault(hub_id, name)) != name:
            text = f"the same hub is named twice, as {first!r} and as {name!r}"
            raise errors.AddressError(f"{text}; name it once: each hub has its rows in one session")


def check_agreement(hubs: Sequence[tuple[Connection, SessionDescription]], options: SessionOptions) -> None:
    """Raise ``RequestRefused`` where two of these hubs have made other envs; it has both addresses."""
    (first, wanted), *others = hubs
    for connection, description in others:
        for what, mine, theirs in _compared(wanted, description, options):
            if mine != theirs:
                raise errors.RequestRefused(
                    f"the hubs at {first.address} and {connection.address} cannot share a vector env: their {what} "
                    f"differ, {errors.brief(mine, 200)} and {errors.brief(theirs, 200)}"
                )


def _compared(
    wanted: SessionDescription, made: SessionDescription, options: SessionOptions
) -> list[tuple[str, Any, Any]]:
    bounds = options.observation_mode in ("same", "different")
    observations: Any = [wanted.observation_spaces[0], made.observation_spaces[0]]
    actions: Any = [wanted.action_space, made.action_space]
    if options.observation_mode != "same":
        observations = [spaces.structure(space) for space in observations]
    if not bounds:
        actions = [spaces.structure(space) for space in actions]
    return [
        ("observation spaces", *observations),
        ("action spaces", *actions),
        ("render modes", wanted.render_mode, made.render_mode),
        ("metadata", wanted.metadata, made.metadata),
        ("kinds of envs", wanted.vector, made.vector),
    ]


def placed(num_envs: int, rooms: Sequence[Capacity]) -> list[int]:
    """The number of envs for each hub, in the order of ``rooms``: on as few hubs as have a free CPU for each env.

    Hubs with more free CPUs are taken first. Where all of them have too few, the envs are divided by free CPUs among
    the hubs that have any, and where none is free, by all CPUs among all hubs.
    """
    weights = [max(0.0, room.cpus_free) for room in rooms]
    is_free = any(weights)
    if not is_free:
        weights = [max(1.0, room.cpus) for room in rooms]
    most = [num_envs if room.envs_free is None else min(num_envs, room.envs_free) for room in rooms]
    if sum(most) < num_envs:
        raise ValueError(f"{num_envs} envs are wanted, and the hubs admit {sum(most)} more")
    chosen: list[int] = []
    for hub in sorted(range(len(rooms)), key=lambda hub: -weights[hub]):
        admitted = sum(most[each] for each in chosen) >= num_envs
        enough = is_free and admitted and sum(weights[each] for each in chosen) >= num_envs
        useful = most[hub] and (weights[hub] or not admitted)
        if not enough and useful and len(chosen) < num_envs:
            chosen.append(hub)
    return divided(num_envs, [weights[hub] if hub in chosen else 0.0 for hub in range(len(rooms))], most)


def divided(count: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """``count`` things divided by these weights: at least one where there is a weight, and never more than ``most``.

    ``count`` is not more than ``most`` in all.
    """
    counts = [1 if weight and limit else 0 for weight, limit in zip(weights, most, strict=True)]
    for _ in range(count - sum(counts)):
        open_hubs = [index for index, each in enumerate(counts) if each < most[index]]
        best = max(open_hubs, key=lambda index: (weights[index] / (counts[index] + 1), -index))
        counts[best] += 1
    return counts


def checked_split(split: Sequence[int], num_envs: int, hubs: int) -> list[int]:
    """The numbers of envs as they were given, one for each hub; ``TypeError`` or ``ValueError`` if they are not."""
    try:
        counts = [*map(operator.index, split)]
    except TypeError:
        raise TypeError(f"split must be a list of numbers of envs, one for each hub, got {split!r}") from None
    if len(counts) != hubs:
        raise ValueError(f"split={counts} has {len(counts)} numbers of envs, and there are {hubs} hubs")
    if min(counts) < 0 or sum(counts) != num_envs:
        raise ValueError(f"split={counts} must have numbers from 0 that make num_envs={num_envs} in all")
    return counts


def room_for(num_envs: int, hubs: Sequence[OpenHub]) -> list[int]:
    """The number of envs for each of these hubs, or ``RequestRefused`` where they have no room for them."""
    try:
        return placed(num_envs, [_room(hub.connection) for hub in hubs])
    except ValueError as error:
        names = ", ".join(hub.member.name for hub in hubs)
        raise errors.RequestRefused(f"{error} ({names})") from error


def roomiest(num_envs: int, hubs: Sequence[OpenHub]) -> list[int]:
    """The number of envs for each of these hubs: all on the first one that has most free CPUs, and admits any."""
    best = max(hubs, key=lambda hub: (_room(hub.connection).envs_free != 0, _room(hub.connection).cpus_free))
    return [num_envs if hub is best else 0 for hub in hubs]


def _room(connection: Connection) -> Capacity:
    return connection.welcome.capacity or Capacity(1, 1, None, None)  # of a hub in another language that does not say


def processes_of(num_workers: Any, counts: Sequence[int]) -> list[Any]:
    """The number of processes for each hub, by its envs; at least one where it has any."""
    if not isinstance(num_workers, int):
        return [num_workers] * len(counts)
    return divided(min(num_workers, sum(counts)), counts, counts)
