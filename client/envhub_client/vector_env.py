"""``HubVectorEnv``: the vector env over any hub."""

from __future__ import annotations

import copy
import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envhub import codec, spaces
from envhub.actions import pack
from envhub.errors import EnvHubError, EnvRaised, Forked, HubTimeout, LocalProtocolError
from envhub.messages import Call, Close, Failure, Made, Make, Op, Reset, SetAttr, World, pack_rows, unpack_rows
from envhub.vector_errors import NothingPending, SessionBusy, SessionClosed
from envhub_client.connection import CONNECT_TIMEOUT_S, Connection
from envhub_client.failures import raise_failure
from envhub_client.lane_choice import lane
from envhub_client.lanes import Outcome
from envhub_client.observations import Observations
from envhub_client.options import SessionOptions
from envhub_client.private_hub import private_hub, world
from envhub_client.reset_arguments import seeds_of, split_mask

CLOSE_TIMEOUT_S = 30.0  # for the hub's own budget for closing envs, and a slow connection
KILL_TIMEOUT_S = 2.0

log = logging.getLogger("envhub")

StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class HubVectorEnv(VectorEnv[Any, Any, np.ndarray]):
    """A vector env whose envs live in a hub: ``gymnasium.vector.VectorEnv`` as of Gymnasium 1.4.

    ``envhub.make_vec`` makes one. Besides the methods of ``VectorEnv`` it has those of ``AsyncVectorEnv``: the
    ``*_async`` and ``*_wait`` halves, ``call``, ``get_attr`` and ``set_attr``. A wait that timed out can be repeated.

    Attributes:
        lane: how the envs are stepped, ``"shared"``, in their workers' own memory, or ``"wire"``, by messages.
        num_workers: how many processes host the envs.
        env_spec: the ``EnvSpec`` of a single env, or None where it has none that can be carried.
    """

    def __init__(
        self, address: str | None, make: Make, options: SessionOptions, timeout: float = CONNECT_TIMEOUT_S
    ) -> None:
        """Make a session and wait until its envs are built.

        Args:
            address: the hub's; None for this program's private hub.
            make: which envs; what ``options`` says is filled in here.
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
        private = private_hub() if address is None else None
        self._allow_pickle = private is not None
        self._connection = Connection(
            address or (private.address if private else ""),
            secrets.token_bytes(16),
            timeout,
            private.pidfd if private else None,
        )
        try:
            made = self._connection.ask(Op.MAKE, self._filled_in(make, world() if private else None)).message
            self._adopt(made)
        except BaseException:  # an interrupt, too, must not leave the hub with envs that nobody will use
            self._end_session(terminate=True)
            raise

    def _filled_in(self, make: Make, surroundings: World | None) -> Make:
        options = self._options
        return Make(
            num_envs=make.num_envs,
            name=make.name,
            kwargs=make.kwargs,
            factories=make.factories,
            num_workers=options.num_workers,
            autoreset_mode=options.autoreset_mode.value,
            observation_mode="same" if options.observation_mode == "same" else "different",
            world=surroundings,
            runner=make.runner,
            wrappers=make.wrappers,
            wrapper_kwargs=make.wrapper_kwargs,
        )

    def _adopt(self, made: Made) -> None:
        self.num_envs = made.num_envs
        self.num_workers = made.num_workers
        self.metadata = {**self._decode(made.metadata), "autoreset_mode": self._options.autoreset_mode}
        self.render_mode = made.render_mode
        self.single_action_space = self._space(made.action_space)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        observation_spaces = [self._space(space) for space in made.observation_spaces]
        self._adopt_observation_spaces(observation_spaces)
        self.env_spec = self._spec(made.spec)
        self._action_leaves = spaces.leaves(self.single_action_space)
        self._observations = Observations(observation_spaces[0], self.num_envs, self._allow_pickle)
        self._lane = lane(self._connection, made, self._observations.leaves, self._action_leaves, self._options)

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
    def lane(self) -> str:
        """How the envs are stepped."""
        return self._lane.name

    @property
    def represented(self) -> dict[str, str]:
        """Where in the infos a ``repr`` stood in for a value that no codec carries, and the first one's."""
        return dict(self._observations.represented)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """Every env's ``np_random_seed``."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of every env's random generator."""
        return self.get_attr("np_random")

    # --- reset --------------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset every env, or those of ``options["reset_mask"]``, and wait.

        Args:
            seed: None, one int (env ``i`` gets ``seed + i``), or one int or None per env.
            options: handed to every env's ``reset``, without ``reset_mask``; not modified.

        Returns:
            Batched observations (of envs left out, their last ones) and infos.

        Raises:
            ValueError, TypeError: seeds or mask of the wrong length, shape or type.
            Exception: what an env raised, as its own class or as ``EnvRaised``.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        *,
        masked: bool = True,
    ) -> None:
        """Begin a reset; arguments and errors as for ``reset``.

        Without ``masked``, a ``reset_mask`` in the options is the envs' own affair.

        Raises:
            SessionBusy: another request is pending.
            SessionClosed: after ``close``.
        """
        self._begin("reset_async")
        seeds = seeds_of(seed, self.num_envs)
        mask, passed_on = split_mask(options, self.num_envs) if masked else ([], options)
        blob = b"" if passed_on is None else self._encode(passed_on)
        self._post(AsyncState.WAITING_RESET, lambda: self._lane.post_reset(Reset(seeds, mask, blob)))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset begun by ``reset_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no reset was begun.
        """
        observations, infos = self.reset_wait_each(timeout)
        return observations, self._batch_infos(infos)

    def reset_wait_each(self, timeout: float | None = None) -> tuple[Any, dict[int, dict[str, Any]]]:
        """As ``reset_wait``, but with the infos as each env gave them, by env; an empty one may be left out."""
        outcome = self._collect(AsyncState.WAITING_RESET, timeout)
        infos = self._observations.take(outcome.rows)
        return self._observations.batch(outcome.observations), infos

    # --- step ---------------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> StepReturn:
        """Step every env once and wait for all of them.

        Args:
            actions: a batch of ``action_space``, as arrays or lists. Neither modified nor checked against bounds.

        Returns:
            Batched observations (the caller's own with ``copy=True``, else a view that holds until the second next
            step), rewards float64 ``(num_envs,)``, terminations and truncations bool ``(num_envs,)``, and infos.

        Raises:
            SpaceMismatch: actions of the wrong count or shape; no env has moved.
            WorkerDied: a worker's process ended.
            HubLost: the hub has ended.
            Exception: what an env raised, as its own class or as ``EnvRaised``; ``reset`` goes on.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step; arguments and errors as for ``step``.

        Raises:
            SessionBusy: another request is pending.
            SessionClosed: after ``close``.
        """
        self._begin("step_async")
        packed = pack(spaces.flatten(self.single_action_space, actions), self._action_leaves, self.num_envs)
        beside = self._pack_beside(packed.beside) if packed.beside else b""
        self._post(AsyncState.WAITING_STEP, lambda: self._lane.post_step(packed.codes, packed.arrays, beside))

    def step_wait(self, timeout: float | None = None) -> StepReturn:
        """Wait for the step begun by ``step_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no step was begun.
        """
        *results, infos = self.step_wait_each(timeout)
        return (*results, self._batch_infos(infos))

    def step_wait_each(
        self, timeout: float | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[int, dict[str, Any]]]:
        """As ``step_wait``, but with the infos as each env gave them, by env; an empty one may be left out."""
        outcome = self._collect(AsyncState.WAITING_STEP, timeout)
        assert outcome.rewards is not None and outcome.terminations is not None and outcome.truncations is not None
        infos = self._observations.take(outcome.rows)
        observations = self._observations.batch(outcome.observations)
        return observations, outcome.rewards, outcome.terminations, outcome.truncations, infos

    def _pack_beside(self, leaves: Sequence[Sequence[Any]]) -> bytes:
        return pack_rows((row, self._encode(list(parts))) for row, parts in enumerate(zip(*leaves, strict=True)))

    def _batch_infos(self, infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for row, info in infos.items():
            batch = self._add_info(batch, info, row)
        return batch

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute; one result per env, in order.

        Raises:
            AttributeError: the envs have no such attribute. The session goes on, as after any exception here.
            ValueError: ``reset``, ``step`` and ``close`` are not to be called this way.
            EncodeError: an argument cannot be sent to a hub on the network.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call.

        Raises:
            SessionBusy: another request is pending.
            SessionClosed: after ``close``.
        """
        self._begin("call_async")
        _check_name(name)
        call = Call(name, self._encode([list(args), kwargs]))
        self._post(AsyncState.WAITING_CALL, lambda: self._connection.send(Op.CALL, call))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the call begun by ``call_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no call was begun.
        """
        self._awaiting(AsyncState.WAITING_CALL)
        reply = self._wait(lambda: self._connection.wait(timeout))
        if isinstance(reply.message, Failure):
            raise_failure(reply.message, self._connection.address)
        return tuple(self._decode(blob) for _, blob in unpack_rows(reply.frames[0], self.num_envs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every env; a method is called. The same as ``call(name)``."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env: one value for all, or a list or tuple with one per env.

        Raises:
            ValueError: a list or tuple of another length.
        """
        self._begin("set_attr")
        _check_name(name)
        if not isinstance(values, (list, tuple)):
            values = [values]
        elif len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._connection.ask(Op.SET_ATTR, SetAttr(name, [self._encode(value) for value in values]))

    def render(self) -> tuple[Any, ...]:
        """Every env's rendered frame."""
        return self.call("render")

    def _encode(self, value: Any) -> bytes:
        return codec.encode(value, codec.as_pickle if self._allow_pickle else codec.refuse)

    def _decode(self, blob: bytes) -> Any:
        return codec.decode(blob, self._allow_pickle)

    # --- the state machine --------------------------------------------------------------------------------------------

    def _begin(self, what: str) -> None:
        if self.closed:
            raise SessionClosed(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._state is not AsyncState.DEFAULT:
            name = str(self._state.value)
            raise SessionBusy(f"Calling `{what}` while waiting for a pending call to `{name}` to complete.", name)

    def _post(self, state: AsyncState, post: Callable[[], None]) -> None:
        """Send a request. Interrupted in the middle it counts as never sent: whether it was, nobody knows."""
        try:
            post()
            self._state = state
        except LocalProtocolError:
            raise  # nothing was sent, and what another thread sent is not ours to give up
        except BaseException:
            self._connection.give_up()
            self._state = AsyncState.DEFAULT
            raise

    def _awaiting(self, state: AsyncState) -> None:
        if self.closed:
            raise SessionClosed(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._state is not state:
            name = str(state.value)
            raise NothingPending(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)

    def _collect(self, state: AsyncState, timeout: float | None) -> Outcome:
        self._awaiting(state)
        outcome: Outcome = self._wait(lambda: self._lane.collect(timeout))
        return outcome

    def _wait(self, wait: Callable[[], Any]) -> Any:
        """Only a wait that timed out, or was interrupted, leaves the request pending."""
        try:
            found = wait()
        except (HubTimeout, LocalProtocolError):
            raise
        except Exception:
            self._state = AsyncState.DEFAULT
            raise
        self._state = AsyncState.DEFAULT
        return found

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the session; ``close`` calls this once.

        Args:
            timeout: seconds for a pending request to end; after them the envs are not closed but killed.
            terminate: kill the envs' processes at once.

        What an env's ``close`` raises is logged.

        Raises:
            LocalProtocolError: another thread is using this vector env; nothing was closed.
        """
        try:
            alone = self._connection.in_use()
        except Forked:
            return  # the session is the parent's
        with alone:
            try:
                if self._state is not AsyncState.DEFAULT:
                    terminate = not self._finish_pending(0 if terminate else timeout) or terminate
            except EnvRaised:
                raise
            except EnvHubError as error:
                log.debug("closing %r: %s", self, error)
            finally:
                self._end_session(terminate)

    def _end_session(self, terminate: bool) -> None:
        timeout = KILL_TIMEOUT_S if terminate else CLOSE_TIMEOUT_S
        try:
            self._connection.give_up()
            self._connection.ask(Op.CLOSE, Close(terminate), timeout=timeout)
        except Exception as error:
            told = error.__cause__ or error
            # Any other error of a hub says that the session is gone already, which is what was to be had.
            level = logging.ERROR if isinstance(told, EnvRaised) else logging.DEBUG
            log.log(level, "closing a session of the hub at %s: %s", self._connection.address, told)
        finally:
            self.closed = True
            self._connection.close()

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
        if not sys.is_finalizing() and not getattr(self, "closed", True) and hasattr(self, "_lane"):
            self.close(terminate=True)


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a method or attribute is a str, got {name!r}")
