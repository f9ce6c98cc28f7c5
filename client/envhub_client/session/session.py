"""The client's side of a session: its making, its state machine, its end."""

from __future__ import annotations

import copy
import logging
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import (
    ConnectionInUse,
    EnvHubError,
    EnvRaised,
    HubLost,
    HubTimeout,
    HubUnreachable,
    LocalProtocolError,
    RequestRefused,
    WorkerDied,
)
from envhub.protocol.messages import Attach, Close, Made, Make, Observe, Op, World
from envhub.transport.address import parse
from envhub.values import codec, spaces
from envhub.values.compression import available
from envhub.vector_errors import NothingPending, SessionBusy, SessionClosed
from envhub_client.connection.connection import CONNECT_TIMEOUT_S, HEARTBEAT_MS, Connection
from envhub_client.lanes.choice import PlainLane, lane
from envhub_client.observer import Seen, seen
from envhub_client.private_hub.process import PrivateHub, private_hub, world
from envhub_client.results.observations import Observations
from envhub_client.results.rendered import Frames
from envhub_client.session.options import SessionOptions
from envhub_client.session.recovery import LastingLane

CLOSE_TIMEOUT_S = 30.0  # for the hub's own budget for closing envs, and a slow connection
KILL_TIMEOUT_S = 2.0
DEATHS_MAX = 3  # of workers that make envs anew, one after the other, as many as the hub takes of one worker
RENEW_S = 0.2  # between tries for another session, where a hub refuses at once

log = logging.getLogger("envhub")


class Sizing(NamedTuple):
    """How many processes host the envs of a session, and why.

    Attributes:
        num_workers: how many.
        reason: why so many, for people; empty where the hub does not say.
    """

    num_workers: int
    reason: str


class HubSession(VectorEnv[Any, Any, np.ndarray]):
    """A session on a hub: how it is made, what is pending, how it ends. ``HubVectorEnv`` adds what it is for.

    Attributes:
        lane: how the envs are stepped, ``"shared"``, in their workers' own memory, or ``"wire"``, by messages.
        sizing: how many processes host the envs, and why.
        autoreset_mode: as in Gymnasium.
        env_spec: the ``EnvSpec`` of a single env, or None where it has none that can be carried.
        compression: how observations are compressed on the wire lane; empty for not at all.
    """

    def __init__(
        self, address: str | None, make: Make | Attach, options: SessionOptions, timeout: float = CONNECT_TIMEOUT_S
    ) -> None:
        """Make a session and wait until its envs are built, or take one over.

        Args:
            address: the hub's; None for this program's private hub.
            make: which envs; what ``options`` says is filled in here. Or which session, whose options are its own.
            options: the session's.
            timeout: seconds for the connection. Building the envs is not timed.

        Raises:
            HubUnreachable: no hub answered.
            RequestRefused: the hub does not make this.
            RuntimeError: the envs' spaces differ.
            UnsupportedSpace: a space has no form on the network.
            Exception: what an env's constructor raised, as its own class or as ``EnvRaised``.
        """
        self._options = options
        self._state = AsyncState.DEFAULT
        self._address = address
        self._make = make
        self._allow_pickle = address is None
        self._connections: list[Connection] = []  # every one on which a session of ours may be; the last is the latest
        try:
            made = self._open(timeout)
            self._connection = self._connections[-1]
            self._adopt(made)
        except BaseException:  # an interrupt, too, must not leave the hub with envs that nobody will use
            self._end_all_but(None)
            raise

    def _open(self, timeout: float, lost: bytes = b"") -> Made:
        """Make a session, on the last of ``_connections``; errors as ``__init__``.

        Args:
            timeout: seconds for the connection.
            lost: the encoded info of the truncation of each env, where the session takes the place of a lost one.
        """
        if self._address is not None:
            return self._open_on(None, timeout, lost)
        private = private_hub()
        try:
            return self._open_on(private, timeout, lost)
        except HubUnreachable:
            if private.alive:
                raise
            return self._open_on(private_hub(), timeout, lost)  # it had just been killed

    def _open_on(self, private: PrivateHub | None, timeout: float, lost: bytes) -> Made:
        address = self._address or (private.address if private else "")
        pidfd, reconnect_timeout = private.pidfd if private else None, self._options.reconnect_timeout
        # Noted before there is a session on it: an interrupt may come as soon as there is.
        self._connections.append(Connection(address, secrets.token_bytes(16), timeout, pidfd, reconnect_timeout))
        connection = self._connections[-1]
        if isinstance(self._make, Attach):
            attached: Made = connection.ask(Op.ATTACH, self._make).message
            return attached
        make = self._filled_in(connection, self._make, world() if private else None, lost)
        made: Made = connection.ask(Op.MAKE, make).message
        return made

    def _end_all_but(self, kept: Connection | None) -> None:
        """End every session but the one on this connection, such as one whose making failed or was interrupted."""
        for connection in [found for found in self._connections if found is not kept]:
            _end(connection, terminate=True)
            self._connections.remove(connection)

    def _filled_in(self, connection: Connection, make: Make, surroundings: World | None, lost: bytes) -> Make:
        options = self._options
        return Make(
            num_envs=make.num_envs,
            name=make.name,
            kwargs=make.kwargs,
            factories=make.factories,
            num_workers=None if options.num_workers == "auto" else options.num_workers,  # type: ignore[arg-type]
            autoreset_mode=options.autoreset_mode.value,
            observation_mode="same" if options.observation_mode == "same" else "different",
            world=surroundings,
            runner=make.runner,
            wrappers=make.wrappers,
            wrapper_kwargs=make.wrapper_kwargs,
            columns=True,
            spin_us=options.spin_us,
            pin=options.pin,
            compression=self._compression(connection),
            fresh=bool(lost),
            faults=options.faults.wire(),
            beat_s=HEARTBEAT_MS / 1000,
            factories_digest=make.factories_digest,
            lost=lost,
        )

    def _compression(self, connection: Connection) -> str:
        """What both sides have of what was asked for.

        Raises:
            RequestRefused: one of them lacks it.
        """
        wanted, address = self._options.compression, parse(connection.address)
        if wanted is None or (wanted == "auto" and (address.is_ipc or address.is_loopback)):
            return ""
        theirs, ours = connection.welcome.compressions, available()
        if wanted == "auto":
            return next((method for method in ours if method in theirs), "")
        for side, found in ((f"the hub at {address.text}", theirs), ("this client", ours)):
            if wanted not in found:
                raise RequestRefused(
                    f'compression={wanted!r}: {side} lacks the library; pip install "envhub-rl[compression]" there'
                )
        return wanted

    def _adopt(self, made: Made) -> None:
        if made.autoreset_mode:
            self._options = replace(
                self._options,
                autoreset_mode=AutoresetMode(made.autoreset_mode),
                observation_mode=made.observation_mode,
            )
        self.num_envs = made.num_envs
        self.sizing = Sizing(made.num_workers, made.sizing)
        log.info("%d workers for %d envs: %s", made.num_workers, made.num_envs, made.sizing)
        self.autoreset_mode = self._options.autoreset_mode
        self.metadata = {**self._decode(made.metadata), "autoreset_mode": self.autoreset_mode}
        self.render_mode = made.render_mode
        self._frames = Frames(made.num_envs, made.render_mode)
        self.single_action_space = self._space(made.action_space)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        observation_spaces = [self._space(space) for space in made.observation_spaces]
        self._adopt_observation_spaces(observation_spaces)
        self.env_spec = self._spec(made.spec)
        self._action_leaves = spaces.leaves(self.single_action_space)
        self._flat_actions = spaces.is_flat(self.single_action_space)
        same_step = self._options.autoreset_mode is AutoresetMode.SAME_STEP
        self._observations = Observations(observation_spaces[0], self.num_envs, self._allow_pickle, same_step)
        first = self._plain_lane(self._connection, made)
        self._lane: PlainLane | LastingLane = first
        if self._options.on_hub_loss == "recreate":
            self._lane = LastingLane(first, self._renew)

    def _plain_lane(self, connection: Connection, made: Made) -> PlainLane:
        self.compression = self._compression(connection)
        leaves = self._observations.leaves
        return lane(connection, made, leaves, self._action_leaves, self._options, self.compression)

    def _renew(self, loss: HubLost, adopt: Callable[[PlainLane], None]) -> None:
        """Go on in a new session, on the hub that has taken the place of the lost one, and ``adopt`` its lane.

        Raises:
            HubLost: there was none within ``reconnect_timeout``, or its envs are others.
            Exception: as at the first making.
        """
        log.warning("%s; its envs are made anew on the hub that takes its place", loss)
        try:
            made = self._open_again(loss)
            connection = self._connections[-1]
            self._check_same(made, loss)
            adopt(self._plain_lane(connection, made))
            self._connection, self.sizing = connection, Sizing(made.num_workers, made.sizing)
        finally:
            self._end_all_but(self._connection)
        log.warning("%d envs stand again on the hub at %s", self.num_envs, self._connection.address)

    def _open_again(self, loss: HubLost) -> Made:
        lost = failure_info(EnvFailure("hub_lost", f"{loss}; the env was made anew"))
        timeout = self._options.reconnect_timeout
        until_s = time.monotonic() + timeout
        deaths = 0
        while True:
            left_s = max(1.0, until_s - time.monotonic())
            try:
                return self._open(min(CONNECT_TIMEOUT_S, left_s), lost)
            except HubUnreachable as error:
                if time.monotonic() + RENEW_S >= until_s:
                    raise HubLost(
                        f"{loss}; and no hub made its envs anew within reconnect_timeout={timeout:g} s: {error}"
                    ) from error
            except WorkerDied:  # of which none of the envs need be the cause
                deaths += 1
                if deaths == DEATHS_MAX:
                    raise
            self._end_all_but(self._connection)
            time.sleep(RENEW_S)

    def _check_same(self, made: Made, loss: HubLost) -> None:
        wanted = [self.single_action_space, self._observations.space]
        found = [self._space(blob) for blob in (made.action_space, made.observation_spaces[0])]
        if [*map(spaces.structure, found)] != [*map(spaces.structure, wanted)]:
            raise HubLost(f"{loss}; the hub that took its place makes envs of other spaces: {found}, not {wanted}")

    def _asking(self, ask: Callable[[], Any]) -> Any:
        """What ``ask`` returns; should it find the hub lost, what follows goes to the next one, if that is wanted."""
        try:
            return ask()
        except HubLost as error:
            if isinstance(self._lane, LastingLane):
                self._lane.lose(error)
            raise

    def _space(self, blob: bytes) -> Space[Any]:
        space: Space[Any] = spaces.build(self._decode(blob))
        return space

    def _spec(self, blob: bytes) -> EnvSpec | None:
        try:
            return self._decode(blob) if blob else None
        except codec.DecodeError as error:  # another version of Gymnasium wrote it, of fields with another meaning
            log.debug("the spec of the envs cannot be read: %s", error)
            return None

    def _adopt_observation_spaces(self, found: list[Space[Any]]) -> None:
        mode = self._options.observation_mode
        self.single_observation_space = found[0]
        if isinstance(mode, tuple):
            self.observation_space, self.single_observation_space = mode
            spaces.check_equivalent(self.single_observation_space, found[0], "different")
        elif mode == "different":
            self.observation_space = batch_differing_spaces(found)
        else:
            self.observation_space = batch_space(found[0], self.num_envs)

    def adopt_spec(self, spec: EnvSpec | None, arguments: dict[str, Any]) -> None:
        """Say in ``spec`` what was made, as ``gymnasium.make_vec`` does, by the env's spec, else by the one given."""
        self.env_spec = self.env_spec or spec
        if self.env_spec is None:
            return
        self.spec = copy.deepcopy(self.env_spec)
        self.spec.kwargs = {**arguments, "num_envs": self.num_envs, "vectorization_mode": "async"}

    @property
    def num_workers(self) -> int:
        """How many processes host the envs."""
        return self.sizing.num_workers

    @property
    def lane(self) -> str:
        """How the envs are stepped."""
        return self._lane.name

    @property
    def represented(self) -> dict[str, str]:
        """Where in the infos a ``repr`` stood in for a value that no codec carries, and the first one's."""
        return dict(self._observations.represented)

    def _encode(self, value: Any) -> bytes:
        return codec.encode(value, codec.as_pickle if self._allow_pickle else codec.refuse)

    def _decode(self, blob: bytes) -> Any:
        return codec.decode(blob, self._allow_pickle)

    # --- the state machine --------------------------------------------------------------------------------------------

    def _begin(self, what: str, among_others: bool = False) -> None:
        if self.closed:
            raise SessionClosed(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._state is not AsyncState.DEFAULT:
            name = str(self._state.value)
            raise SessionBusy(f"Calling `{what}` while waiting for a pending call to `{name}` to complete.", name)
        if self._lane.settle() and not among_others:
            raise SessionBusy(f"Calling `{what}` while envs are under way that `recv` has not returned.", "recv")

    def _post(self, state: AsyncState, post: Callable[..., None], *args: Any) -> None:
        """Send a request. Interrupted in the middle it counts as never sent: whether it was, nobody knows."""
        try:
            post(*args)
            self._state = state
        except ConnectionInUse:
            raise  # nothing was sent, and what another thread sent is not ours to give up
        except BaseException:
            self._give_up()
            raise

    def _wait(self, state: AsyncState, wait: Callable[..., Any], *args: Any) -> Any:
        """Wait for what is pending. Only a wait that timed out, or was interrupted, leaves it so: wait again."""
        if self.closed:
            raise SessionClosed(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._state is not state:
            name = str(state.value)
            raise NothingPending(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        try:
            found = wait(*args)
        except (HubTimeout, ConnectionInUse):
            raise
        except Exception:
            self._give_up()
            raise
        self._state = AsyncState.DEFAULT
        return found

    def _give_up(self) -> None:
        """Have nothing pending: the next request waits until the hub is done with what is, and its result is dropped.

        A failed request is pending no more, unless the error is not its own: a signal handler may raise anything.
        """
        self._connection.give_up()
        self._state = AsyncState.DEFAULT

    def _forget_pending(self, error: BaseException) -> None:
        """Give up the request of a call that both begins it and waits, such as ``step``, after this error in there.

        Its caller knows of no request that is to be waited for. What was pending before the call stays pending.
        """
        if not isinstance(error, (SessionBusy, SessionClosed, ConnectionInUse)):
            self._give_up()

    @property
    def token(self) -> str:
        """The key to this session: with it, ``Client.attach`` takes it over or looks at it. Keep it as a password."""
        return self._connection.token.hex()

    def detach(self) -> str:
        """Leave the session as it is, for another process to take it over by ``Client.attach`` within the hub's lease.

        This vector env is closed then; the envs are not.

        Returns:
            The session's ``token``.

        Raises:
            RequestRefused: the envs are this program's private hub's, which ends with it.
            HubLost: the hub is known to be lost, and the session with it.
            SessionBusy: a request is pending, or envs are under way.
            SessionClosed: after ``close``.
        """
        self._begin("detach")
        if self._address is None:
            raise RequestRefused(
                "the envs of a private hub end with its program; make them on a hub of its own to leave them to another"
            )
        self._asking(self._connection.tend)
        token = self.token
        self._connection.close()
        self.closed = True
        return token

    def observe(self) -> Seen:
        """What the envs showed last, such as what another process left; nothing is stepped.

        Raises:
            SessionLost: the session has ended, or was taken over.
        """
        self._begin("observe")
        wanted = Observe(self._connection.token, described=True)
        return seen(self._asking(lambda: self._connection.ask(Op.OBSERVE, wanted)), self._observations)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the session; ``close`` calls this once.

        Args:
            timeout: seconds for a pending request to end; after them the envs are not closed but killed.
            terminate: kill the envs' processes at once.

        What an env's ``close`` raises is logged. Interrupted, it is to be called again.

        Raises:
            LocalProtocolError: another thread is using this vector env; nothing was closed.
        """
        try:
            self._connection.in_use.check()
        except LocalProtocolError:
            return  # the session is the parent's, or an earlier attempt was interrupted when all was done
        with self._connection.in_use:
            if isinstance(self._lane, LastingLane):
                self._lane.stop()
            try:
                if self._state is not AsyncState.DEFAULT:
                    terminate = not self._finish_pending(0 if terminate else timeout) or terminate
            except EnvRaised:
                raise
            except EnvHubError as error:
                log.debug("closing %r: %s", self, error)
            finally:
                self._end_all_but(self._connection)
                _end(self._connection, terminate)
                self.closed = True

    def _finish_pending(self, timeout: float | None) -> bool:
        name = self._state.value
        logger.warn(f"Calling `close` while waiting for a pending call to `{name}` to complete.")
        try:
            getattr(self, f"{name}_wait")(timeout)
        except HubTimeout:
            return False
        return True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A vector env is a connection: it is neither pickled nor copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied; make one where it is used")

    def __del__(self) -> None:
        """Free the session of a vector env that nobody closed; at the program's end its connection's end does it."""
        if sys.is_finalizing() or getattr(self, "closed", True):
            return
        if hasattr(self, "_lane"):
            self.close(terminate=True)
        elif hasattr(self, "_connections"):  # its making was interrupted, and so was the end of that
            self._end_all_but(None)


def _end(connection: Connection, terminate: bool) -> None:
    """End the session of a connection, and the connection."""
    # A hub that is out of reach ends the session by its lease.
    timeout = KILL_TIMEOUT_S if terminate or connection.out_of_reach else CLOSE_TIMEOUT_S
    try:
        connection.give_up()
        connection.ask(Op.CLOSE, Close(terminate), timeout=timeout)
    except Exception as error:
        told = error.__cause__ or error
        # Any other error of a hub says that the session is gone already, which is what was to be had.
        level = logging.ERROR if isinstance(told, EnvRaised) else logging.DEBUG
        log.log(level, "closing a session of the hub at %s: %s", connection.address, told)
    connection.close()  # but not at an interrupt: without the connection nobody could end the session any more
