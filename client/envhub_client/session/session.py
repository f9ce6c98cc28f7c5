"""A session on a hub: how it is made, what is pending, how it goes on after a loss, how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState

from envhub import errors
from envhub.env_failure import EnvFailure, failure_info
from envhub.protocol.client import Reply
from envhub.protocol.messages import Attach, Call, Close, Failure, Made, Make, Op, Reset, SetAttr, World
from envhub.registration import REMOTE
from envhub.secret import Secret
from envhub.transport.address import guarded, parse, written
from envhub.values import codec, spaces
from envhub.values.compression import available
from envhub.values.leaf import OBJECT
from envhub.vector_errors import NothingPending, SessionBusy, SessionClosed
from envhub_client.connection.connection import CONNECT_TIMEOUT_S, Connection, connect
from envhub_client.connection.failures import raise_failure
from envhub_client.connection.zeromq_transport import HEARTBEAT_MS
from envhub_client.deadline import Deadline
from envhub_client.frames import hide_frames
from envhub_client.lanes.base import Lane
from envhub_client.lanes.shared import shared_lane
from envhub_client.lanes.wire import WireLane
from envhub_client.private_hub.in_process import OWN_WORLD, InProcessTransport
from envhub_client.private_hub.process import PrivateHub, is_env_of_worker, private_hub
from envhub_client.private_hub.program_environment import by_value_if_unimportable, program_environment
from envhub_client.session import hosting
from envhub_client.session.factories import own_python, pickled_for_workers
from envhub_client.session.hosting import HostingOptions
from envhub_client.session.in_use import InUse
from envhub_client.session.options import ObservationMode, SessionOptions
from envhub_client.session.recovery import RecoveringLane
from envhub_client.session.shares import Shares

CLOSE_TIMEOUT_S = 30.0  # for the hub's own budget for closing envs, and a slow connection
KILL_TIMEOUT_S = 2.0
DEATHS_MAX = 3  # of workers that make the envs again, one after the other; a hub tolerates as many of one worker
RENEW_S = 0.2  # between tries for another session, where a hub refuses at once

NOT_RUN = "envhub.registration:refuse_to_make"  # in place of an entry point that is the hub's choice
GYMNASIUM_WRAPPER = re.compile(r"gymnasium\.wrappers\.\w+:(?!RecordVideo)\w+")

log = logging.getLogger("envhub")

Result = TypeVar("Result")


class Sizing(NamedTuple):
    """How many processes host the envs of a session, and why.

    Attributes:
        num_workers: how many.
        reason: why that many, for people; empty where the hub does not say.
    """

    num_workers: int
    reason: str


class Session:
    """A session on a hub, through which a vector env does everything.

    Attributes:
        address: of the hub, as it was given but without its keys; None for the private hub, or without one.
        allow_pickle: whether what comes from the hub may be unpickled, for the hub is this program's own.
        options: its options; of a session that was taken over, as far as the hub reports them.
        metadata, render_mode, env_spec, action_space, action_leaves: of one env.
        observation_spaces: of each env, or of the first one for all.
        compression: how observations are compressed on the wire lane; empty for not at all.
        vector: whether each worker's envs are one vector env.
        in_use: for ``with``: use the session in this thread alone. Entering it raises ``SessionInUse`` where another
            thread uses it. Whoever looks at ``state``, or at what is outstanding, holds it until that is acted on.
        state: which request is pending.
        last_reset: the last reset that was begun, once there is one.
        closed: whether it is over, or left to another process.
    """

    lane: Lane
    last_reset: Reset

    def __init__(
        self,
        owner: str,
        address: str | Secret[str] | None,
        make: Make | Attach,
        options: SessionOptions,
        timeout: float | None = None,
    ) -> None:
        """Make a session and wait until its envs are built, or take one over; without an address on the private hub.

        ``owner`` is the name of the class that holds it. What ``options`` says is filled in to ``make``. The connection
        may take ``timeout`` seconds, by default 10; building the envs is not timed.

        Raises:
            HubUnreachable: no hub answered, or this system is not Linux.
            RequestRefused: the hub does not make this.
            RuntimeError: the envs' spaces differ.
            UnsupportedSpace: a space has no form on the network.
            Exception: what an env's constructor raised, as its own class or as ``EnvRaised``.
        """
        if sys.platform != "linux":
            raise errors.HubUnreachable(
                f"EnvHub needs Linux, and this is {sys.platform}: run the program on a Linux machine, or in Docker"
            )
        self._owner = owner
        self.in_use = InUse()
        # An env that makes a vector env has it in its own process: its worker is one of many already.
        within = address is None and is_env_of_worker()
        own = replace(options.hosting, one_per_process=False)
        self.options = replace(options, num_workers=0, hosting=own) if within else options
        self.state = AsyncState.DEFAULT
        self.closed = False
        self._hub: str | Secret[str] | None = guarded(address)
        self.address = None if self._hub is None else written(self._hub)
        self._make = make
        self.allow_pickle = address is None
        self._attributes: dict[tuple[Any, ...], SetAttr] = {}  # that were set, by name and rows, if a hub may follow
        self._connections: list[Connection] = []  # every one on which a session of ours may be; the last is the latest
        try:
            made = self._open(CONNECT_TIMEOUT_S if timeout is None else timeout)
            self.connection = self._connections[-1]
            self._adopt(made)
        except BaseException as error:  # an interrupt, too, must not leave the hub with envs that are not used
            self._end_all_but(None)
            hide_frames(error)
            raise

    def _open(self, timeout: float, lost: bytes = b"") -> Made:
        """Make a session, on the last of ``_connections``; errors as ``__init__``.

        In place of a lost one, ``lost`` is the encoded info of the truncation of each env.
        """
        if self.options.num_workers == 0:
            self._connections.append(Connection(InProcessTransport(), secrets.token_bytes(16)))
            return self._open_in(OWN_WORLD, lost)
        private = private_hub() if self.address is None else None
        try:
            return self._open_on(private, timeout, lost)
        except errors.HubUnreachable:
            if private is None or private.alive:
                raise
            return self._open_on(private_hub(), timeout, lost)  # it had just been killed

    def _open_on(self, private: PrivateHub | None, timeout: float, lost: bytes) -> Made:
        address, own = (private.address, private.own) if private else (self._hub or "", None)
        reconnect_timeout = self.options.reconnect_timeout
        # Noted before there is a session on it: an interrupt may come as soon as there is.
        self._connections.append(connect(address, secrets.token_bytes(16), timeout, own, reconnect_timeout))
        return self._open_in(program_environment() if private else None, lost)

    def _open_in(self, environment: World | None, lost: bytes) -> Made:
        """Make a session, or take one over, by the last of ``_connections``."""
        connection = self._connections[-1]
        if isinstance(self._make, Attach):
            attached: Made = connection.ask(Op.ATTACH, self._make).message
            if attached.num_envs != len(attached.steps):
                raise errors.RemoteProtocolError(
                    f"the hub at {connection.address} gave {attached.num_envs} envs, and steps of {len(attached.steps)}"
                )
            return attached
        make = self._filled_in(connection, self._make, environment, lost)
        try:
            made: Made = connection.ask(Op.MAKE, make).message
        finally:
            connection.making_line.end()
        if made.num_envs != make.num_envs:
            raise errors.RemoteProtocolError(
                f"the hub at {connection.address} made {made.num_envs} envs in place of {make.num_envs}"
            )
        return made

    def _end_all_but(self, kept: Connection | None) -> None:
        """End every session but the one on this connection, such as one whose making failed or was interrupted."""
        for connection in [each for each in self._connections if each is not kept]:
            _end(connection, terminate=True)
            self._connections.remove(connection)

    def _filled_in(self, connection: Connection, make: Make, environment: World | None, lost: bytes) -> Make:
        options = self.options
        if make.kwargs_each:
            self.require(2, "arguments for each env")
        if make.vector:
            self.require(2, "vector=True")
        if options.hosting != HostingOptions():
            self.require(2, f"any of {', '.join(hosting.FIELDS)}")
        chosen = [name for name in hosting.PRIVATE if getattr(options.hosting, name) is not None]
        if chosen and (environment is None or options.num_workers == 0):
            where = "num_workers=0 has the program's own" if environment is not None else "its operator says it"
            raise errors.RequestRefused(f"{' and '.join(chosen)}: for private hubs (hub=None) only; {where}")
        if environment is not None and chosen:
            python = "" if options.hosting.python is None else os.path.expanduser(str(options.hosting.python))
            environment = replace(environment, python=python, rendering=options.hosting.rendering or "")
        num_workers = None if options.num_workers in ("auto", 0) else options.num_workers
        return replace(
            make,
            num_workers=self.sizing.num_workers if lost and self.vector else num_workers,  # type: ignore[arg-type]
            autoreset_mode=options.autoreset_mode.value,
            observation_mode=options.observation_mode if isinstance(options.observation_mode, str) else "different",
            world=environment,
            columns=True,
            spin_us=options.spin_us,
            pin=options.pin,
            compression=self._compression(connection),
            fresh=bool(lost),
            faults=options.faults.wire(),
            beat_s=HEARTBEAT_MS / 1000,
            lost=lost,
            hosting=options.hosting.wire(),
            **_setup(make, options.hosting.worker_setup, environment is not None),
        )

    def _compression(self, connection: Connection) -> str:
        """What both sides have of what was asked for.

        Raises:
            RequestRefused: one of them lacks it.
        """
        wanted, address = self.options.compression, parse(connection.address)
        if wanted is None or (wanted == "auto" and (address.is_ipc or address.is_loopback)):
            return ""
        theirs, ours = connection.welcome.compressions, available()
        if wanted == "auto":
            return next((method for method in ours if method in theirs), "")
        for side, methods in ((f"the hub at {address.text}", theirs), ("this client", ours)):
            if wanted not in methods:
                raise errors.RequestRefused(
                    f'compression={wanted!r}: {side} lacks the library; pip install "envhub-rl[compression]" there'
                )
        return wanted

    def _adopt(self, made: Made) -> None:
        try:
            self._describe(made)
        except errors.EnvHubError:
            raise
        except (ValueError, TypeError) as error:
            address = self.connection.address
            raise errors.RemoteProtocolError(f"the hub at {address} describes no session: {error}") from error
        self._shares = Shares(self.num_envs, max(1, self.sizing.num_workers))
        self.lane = self._open_lane(self.connection, made)
        if self.options.on_hub_loss == "recreate":
            self.lane = RecoveringLane(self.lane, self._renew)

    def _describe(self, made: Made) -> None:
        """Take over what the hub says of the session.

        Raises:
            UnsupportedSpace: a space is not carried, or too large.
            ValueError, TypeError: it is malformed.
        """
        if made.autoreset_mode:
            mode = cast(ObservationMode, made.observation_mode)  # which the options check
            self.options = replace(
                self.options, autoreset_mode=AutoresetMode(made.autoreset_mode), observation_mode=mode
            )
        self.num_envs, self.vector = made.num_envs, made.vector
        self.sizing = Sizing(0 if self.options.num_workers == 0 else made.num_workers, made.sizing)
        log.info("%d workers for %d envs: %s", made.num_workers, made.num_envs, made.sizing)
        self.metadata: dict[str, Any] = dict(self.decode(made.metadata))
        self.render_mode = made.render_mode
        self.env_spec = self._spec(made.spec)
        if len(made.observation_spaces) not in (1, made.num_envs):
            raise ValueError(f"{len(made.observation_spaces)} observation spaces of {made.num_envs} envs")
        self.action_space = self._space(made.action_space)
        self.action_leaves = spaces.leaves(self.action_space)
        self.observation_spaces = [self._space(space) for space in made.observation_spaces]
        self._observation_leaves = [leaf for leaf in spaces.leaves(self.observation_spaces[0]) if leaf != OBJECT]

    def _open_lane(self, connection: Connection, made: Made) -> Lane:
        """The shared lane where it can be had, on the hub's machine, else the wire lane."""
        options = self.options
        self.compression = self._compression(connection)
        wire = WireLane(connection, made.num_envs, self._observation_leaves, options.copy, self.compression)
        if options.num_workers == 0:
            wire.name = "in-process"
        if options.lane == "wire" or options.num_workers == 0:
            return wire
        return shared_lane(wire, connection, made.ticket, self.action_leaves) or wire

    def _renew(self, loss: errors.HubLost, adopt: Callable[[Lane], None]) -> None:
        """Go on in a new session, on the hub that has taken the place of the lost one, and ``adopt`` its lane.

        Raises:
            HubLost: there was none within ``reconnect_timeout``, or its envs are others.
            Exception: as at the first making.
        """
        log.warning("%s; its envs are made again on the hub that takes its place", loss)
        try:
            made = self._open_again(loss)
            connection = self._connections[-1]
            self._check_same(made, loss)
            self._set_again(connection)
            adopt(self._open_lane(connection, made))
            self.connection, self.sizing = connection, Sizing(made.num_workers, made.sizing)
        finally:
            self._end_all_but(self.connection)
        log.warning("%d envs exist again on the hub at %s", self.num_envs, self.connection.address)

    def _open_again(self, loss: errors.HubLost) -> Made:
        lost = failure_info(EnvFailure("hub_lost", f"{loss}; the env was made anew"))
        timeout = self.options.reconnect_timeout
        deadline = Deadline(timeout)
        deaths = 0
        while True:
            try:
                return self._open(min(CONNECT_TIMEOUT_S, max(1.0, deadline.left_s())), lost)
            except errors.HubUnreachable as error:
                if deadline.left_s() <= RENEW_S:
                    raise errors.HubLost(
                        f"{loss}; and no hub made its envs anew within reconnect_timeout={timeout:g} s: {error}"
                    ) from error
            except errors.WorkerDied:  # the cause need not be one of the envs
                deaths += 1
                if deaths == DEATHS_MAX:
                    raise
            self._end_all_but(self.connection)
            time.sleep(RENEW_S)

    def _check_same(self, made: Made, loss: errors.HubLost) -> None:
        wanted = [self.action_space, self.observation_spaces[0]]
        new = [self._space(blob) for blob in (made.action_space, made.observation_spaces[0])]
        if [*map(spaces.structure, new)] != [*map(spaces.structure, wanted)]:
            raise errors.HubLost(f"{loss}; the hub that took its place makes envs of other spaces: {new}, not {wanted}")
        if self.vector and made.num_workers != self.sizing.num_workers:
            raise errors.HubLost(f"{loss}; the hub that took its place divides the vector env among other workers")

    def _set_again(self, connection: Connection) -> None:
        """Set the attributes that were set in the sessions before, in the same order; errors as for ``_renew``."""
        for message in self._attributes.values():
            try:
                connection.ask(Op.SET_ATTR, message)
            except errors.HubLost:
                raise
            except Exception as error:
                if not isinstance(errors.raised_by_env(error) or error, errors.EnvHubError):
                    raise  # of a signal handler
                log.warning("the attribute %r cannot be set again: %s", message.name, error)

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """If the hub proves lost in the block, later requests go to the next hub, where ``on_hub_loss`` says so."""
        try:
            yield
        except errors.HubLost as error:
            if isinstance(self.lane, RecoveringLane):
                self.lane.lose(error)
            raise

    def _space(self, blob: bytes) -> Space[Any]:
        space: Space[Any] = spaces.build(self.decode(blob), spaces.SPACE_BYTES_MAX // self.num_envs)
        return space

    def _spec(self, blob: bytes) -> EnvSpec | None:
        try:
            spec: EnvSpec | None = self.decode(blob) if blob else None
            if self.allow_pickle or spec is None:
                return spec
            # ``gymnasium.make`` imports what stands before a colon; the id of a spec that a worker sends has none.
            return None if ":" in spec.id else _inert(spec, self._asked)
        except (codec.DecodeError, errors.RemoteProtocolError) as error:  # another version of Gymnasium wrote it
            log.debug("the spec of the envs cannot be read: %s", error)
            return None

    @property
    def _asked(self) -> dict[str, Any]:
        """The arguments that this program has given for every env."""
        make = self._make
        return codec.decode(make.kwargs) if isinstance(make, Make) and make.kwargs else {}

    def encode(self, value: Any) -> bytes:
        """The value as it is sent to the hub; errors as for ``codec.encode``."""
        return codec.encode(value, codec.as_pickle if self.allow_pickle else codec.refuse)

    def decode(self, blob: bytes) -> Any:
        """The value that came from the hub.

        Raises:
            RemoteProtocolError: it is malformed, or breaks a limit of the codec.
            DecodeError: from the private hub, it cannot be unpickled.
        """
        try:
            return codec.decode(blob, self.allow_pickle)
        except codec.DecodeError as error:
            if self.allow_pickle:
                raise
            raise errors.RemoteProtocolError(f"a value of the hub cannot be read: {error}") from error

    # --- requests -----------------------------------------------------------------------------------------------------

    def check_free(self, what: str, among_others: bool = False, resets_all: bool = False) -> None:
        """Check that ``what`` may be begun; with ``among_others`` also while some envs are outstanding.

        ``resets_all``: it is a reset of all envs, which may be begun while some wait for others of their share.

        Raises:
            SessionBusy: another request is pending, or envs are outstanding.
            SessionClosed: after ``close``.
        """
        if self.closed or self.connection.in_use.closed:
            raise self._closed_error()
        if self.state is not AsyncState.DEFAULT:
            name = str(self.state.value)
            raise SessionBusy(f"Calling `{what}` while waiting for a pending call to `{name}` to complete.", name)
        if self._shares.held and not among_others and not resets_all:
            text = f"while envs {self._shares.held} wait for envs {self._shares.missing} of their share to be sent."
            raise SessionBusy(f"Calling `{what}` {text}", "send")
        if self.lane.settle() and not among_others:
            raise SessionBusy(f"Calling `{what}` while envs are under way that `recv` has not returned.", "recv")

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs; those of a vector env wait for the others of their share.

        Raises:
            ValueError: one of them is under way, or waits already; no env has moved.
        """
        if not self.vector:
            self.lane.begin_rows(env_ids, codes, arrays)
            return
        moving = self.lane.moving[env_ids]
        if moving.any():
            raise ValueError(f"envs {env_ids[moving].tolist()} are under way; receive them first")
        self._shares.send(env_ids, codes, arrays, self.lane.begin_rows)

    def begin_reset(self, reset: Reset, resets_all: bool) -> None:
        """Begin a reset; one of all envs gives up those that wait for others of their share."""
        if resets_all:
            self._shares.give_up()
        self.last_reset = reset
        self.begin(AsyncState.WAITING_RESET, self.lane.begin_reset, reset)

    def check_received(self) -> None:
        """Check that some env is under way.

        Raises:
            NothingPending: none is.
        """
        if self.lane.outstanding:
            return
        why = "without any prior call to `send` or `async_reset`."
        if held := self._shares.held:
            why = f"while envs {held} of a vector env wait for envs {self._shares.missing} of their share to be sent."
        raise NothingPending(f"Calling `recv` {why}", "recv")

    def require(self, minor: int, what: str) -> None:
        """Check that the hub speaks this minor version of the protocol, which ``what`` came with.

        Raises:
            RequestRefused: it is older.
        """
        if not self.speaks(minor):
            connection = self._connections[-1]
            spoken = errors.shown(connection.welcome.version, 20)
            raise errors.RequestRefused(
                f"the hub at {connection.address} speaks protocol {spoken}; {what} came with 1.{minor}: upgrade the hub"
            )

    def speaks(self, minor: int) -> bool:
        """True if the hub speaks this minor version of the protocol, or a later one."""
        connection = self._connections[-1]  # so also of a session that is being made
        found = connection.welcome.version.partition(".")[2]
        return found.isdecimal() and int(found[:9]) >= minor

    def _closed_error(self) -> SessionClosed:
        return SessionClosed(f"Trying to operate on `{self._owner}`, after a call to `close()`.")

    def begin(self, state: AsyncState, begin: Callable[..., None], *args: Any) -> None:
        """Begin a request, which ``state`` names; interrupted, it counts as never begun."""
        try:
            begin(*args)
            self.state = state
        except errors.ConnectionInUse:
            raise  # nothing was sent, and what another thread sent is not ours to give up
        except BaseException:
            self._give_up()
            raise

    def wait(self, state: AsyncState, wait: Callable[..., Result], *args: Any) -> Result:
        """What ``wait`` returns for the pending request.

        Only a wait that timed out or was interrupted leaves the request pending: wait again.

        Raises:
            NothingPending: ``state`` does not name the pending request.
            SessionClosed: after ``close``.
        """
        if self.closed:
            raise self._closed_error()
        if self.state is not state:
            name = str(state.value)
            raise NothingPending(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        try:
            result = wait(*args)
        except (errors.HubTimeout, errors.ConnectionInUse):
            raise
        except Exception as error:
            self._give_up()
            hide_frames(error)
            raise
        self.state = AsyncState.DEFAULT
        return result

    def _give_up(self) -> None:
        """Have nothing pending: the next request waits until the hub is done with what is, and its result is dropped.

        A failed request is pending no more, unless the error is not its own: a signal handler may raise anything.
        """
        self.connection.give_up()
        if isinstance(self.lane, RecoveringLane):
            self.lane.give_up()
        self.state = AsyncState.DEFAULT

    def forget_pending(self, error: BaseException) -> None:
        """Give up the request of a call that both begins it and waits, such as ``step``, after this error in there.

        Its caller knows of no request that is to be waited for. What was pending before the call stays pending.
        """
        if not isinstance(error, (SessionBusy, SessionClosed, NothingPending, errors.ConnectionInUse)):
            self._give_up()
            hide_frames(error)

    def drop_pending(self) -> None:
        """Give up the request that was begun and not waited for, if there is one."""
        if self.state is not AsyncState.DEFAULT and not self.closed:
            self._give_up()

    def ask(self, op: Op, message: Any) -> Reply:
        """The hub's reply to a request other than a reset or step; errors as for ``Connection.ask``."""
        with self._noticing_loss():
            return self.connection.ask(op, message)

    def set_attr(self, message: SetAttr) -> None:
        """Set an attribute; errors as for ``ask``."""
        self.ask(Op.SET_ATTR, message)
        if self.options.on_hub_loss == "recreate":
            key = message.name, *message.rows
            self._attributes.pop(key, None)
            self._attributes[key] = message

    def begin_call(self, call: Call) -> None:
        """Begin a call."""
        with self._noticing_loss():
            self.begin(AsyncState.WAITING_CALL, self.connection.send, Op.CALL, call)

    def wait_call(self, timeout: float | None) -> Reply:
        """The reply to the call that was begun; errors as for ``wait``, and what an env raised."""
        with self._noticing_loss():
            reply = self.wait(AsyncState.WAITING_CALL, self.connection.wait, timeout)
            if isinstance(reply.message, Failure):
                raise_failure(reply.message, self.connection.address)
            return reply

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def named(self) -> tuple[str, dict[str, Any]] | None:
        """The name and arguments by which a public hub makes another such env; None if they are not known."""
        make = self._make
        if self.allow_pickle or isinstance(make, Attach) or not make.name or make.kwargs_each or make.wrappers:
            return None
        return make.name, self._asked

    def detach(self) -> None:
        """Leave the session to another process, see ``HubVectorEnv.detach``."""
        self.check_free("detach")
        if self.address is None:
            raise errors.RequestRefused(
                "the envs of a private hub end with its program; make them on a hub of its own to leave them to another"
            )
        with self._noticing_loss():
            self.connection.tend()
        self.connection.close()
        self.closed = True

    def close(self, terminate: bool, finish: Callable[[], bool]) -> None:
        """End the session, with ``terminate`` by killing the envs' processes. Interrupted, it is to be called again.

        ``finish`` waits for the pending request, if there is one; the processes are also killed where it returns False.

        Raises:
            LocalProtocolError: another thread is using this session; nothing was closed.
            EnvRaised: as an env raised it in the pending request; all is closed.
        """
        with self.in_use:
            try:
                self.connection.in_use.check()
            except errors.LocalProtocolError:  # it is the parent's, or an earlier attempt was interrupted near its end
                self.connection.close()
                return
            with self.connection.in_use:
                self._close(terminate, finish)

    def _close(self, terminate: bool, finish: Callable[[], bool]) -> None:
        if isinstance(self.lane, RecoveringLane):
            self.lane.stop()
        try:
            if self.state is not AsyncState.DEFAULT:
                terminate = not finish() or terminate
        except errors.EnvRaised:
            raise
        except errors.EnvHubError as error:
            log.debug("closing a %s: %s", self._owner, error)
        finally:
            self._end_all_but(self.connection)
            _end(self.connection, terminate)
            self.closed = True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free a session that was not closed; at the program's end its connection's end does it."""
        if is_finalizing() or getattr(self, "closed", True):
            return
        if hasattr(self, "lane"):
            with contextlib.suppress(errors.Forked):  # it is the parent's
                self.close(terminate=True, finish=lambda: False)
        elif hasattr(self, "_connections"):  # its making was interrupted, and so was the end of that
            self._end_all_but(None)


def _end(connection: Connection, terminate: bool) -> None:
    """End the session of a connection, and the connection."""
    # A hub that is out of reach ends the session by its lease.
    out_of_reach = connection.protocol.trouble(time.monotonic())
    timeout = KILL_TIMEOUT_S if terminate or out_of_reach else CLOSE_TIMEOUT_S
    try:
        connection.give_up()
        connection.ask(Op.CLOSE, Close(terminate), timeout=timeout)
    except Exception as error:
        raised = errors.raised_by_env(error)
        if not isinstance(raised or error, errors.EnvHubError):
            raise  # of a signal handler
        # Any other error of a hub says that the session is gone already, which is what was wanted.
        level = logging.DEBUG if raised is None else logging.ERROR
        log.log(level, "closing a session of the hub at %s: %s", connection.address, raised or error)
    connection.close()  # but not at an interrupt: without the connection the session could not be ended any more


def _setup(make: Make, setup: Any, is_private: bool) -> dict[str, Any]:
    """The fields of a request that say what sets workers up.

    Raises:
        TypeError: it cannot be pickled.
    """
    if isinstance(setup, str) and is_private:
        setup = by_value_if_unimportable(setup)
    if setup is None or isinstance(setup, str):
        return {"worker_setup": setup or ""}
    return {"worker_setup_code": pickled_for_workers("worker_setup", setup), "python": make.python or own_python()}


def _inert(spec: EnvSpec, asked: dict[str, Any]) -> EnvSpec:
    """The spec of a hub on the network, which names nothing to run but what is registered here under its id.

    It names that only where ``own_spec`` does. Of wrappers, Gymnasium's own are kept, without those that write files.
    """
    own = own_spec(spec, asked)
    wrappers = tuple(
        each if GYMNASIUM_WRAPPER.fullmatch(each.entry_point) else replace(each, entry_point=NOT_RUN)
        for each in spec.additional_wrappers
    )
    inert = replace(spec, additional_wrappers=wrappers)
    for name in ("entry_point", "vector_entry_point"):
        if getattr(inert, name) != getattr(own, name, None):
            setattr(inert, name, NOT_RUN if getattr(inert, name) else None)
    return inert


def own_spec(spec: EnvSpec, asked: dict[str, Any]) -> EnvSpec | None:
    """What is registered in this program under the id of a hub's spec; None where it may not be made by that spec.

    It may not be made with arguments that are neither registered nor ``asked`` for: they are the hub's choice, such as
    the path of a file. EnvHub's own id is always refused: it makes any env of this machine, of any module, writes
    recordings, and runs ssh.
    """
    own = None if spec.id == REMOTE else gymnasium.registry.get(spec.id)
    return own if own is not None and _is_part(spec.kwargs, {**own.kwargs, **asked}) else None


def _is_part(some: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether all of ``some`` is in ``whole``, with equal values."""
    try:
        return all(name in whole and codec.encode(some[name]) == codec.encode(whole[name]) for name in some)
    except codec.EncodeError:  # a registered argument is no data
        return False
