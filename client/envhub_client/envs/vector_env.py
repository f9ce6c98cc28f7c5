"""``HubVectorEnv``: the vector env over any hub."""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space, logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envhub.errors import (
    EnvTimeout,
    Forked,
    HubTimeout,
    RemoteProtocolError,
    RequestRefused,
    RestartsExhausted,
    SpaceMismatch,
    WorkerDied,
)
from envhub.protocol.client import Reply
from envhub.protocol.messages import Attach, Call, Make, Reset, SetAttr, pack_rows, unpack_rows
from envhub.secret import Secret
from envhub.values import spaces
from envhub.values.actions import pack
from envhub.values.misfit import misfit
from envhub_client.batch import Batch
from envhub_client.deadline import Deadline
from envhub_client.envs.arguments import checked_env_ids, options_of, seeds_of, split_mask
from envhub_client.envs.exclusive import exclusive
from envhub_client.frames import hiding_frames
from envhub_client.observer import Seen, seen
from envhub_client.results.observations import Observations
from envhub_client.results.rendered import NOT_RESET, Frames
from envhub_client.results.rewards import Rewards
from envhub_client.session.description import Sizing
from envhub_client.session.options import SessionOptions
from envhub_client.session.session import Session

StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any]]
PartReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any], np.ndarray]
EachOptions = list[dict[str, Any] | None] | tuple[dict[str, Any] | None, ...]
Options = dict[str, Any] | EachOptions | None


class HubVectorEnv(VectorEnv[Any, Any, np.ndarray]):
    """A vector env whose envs live in a hub: ``gymnasium.vector.VectorEnv`` as of Gymnasium 1.4.

    ``envhub.make_vec`` makes one. Besides the methods of ``VectorEnv`` it has those of ``AsyncVectorEnv``: the
    ``*_async`` and ``*_wait`` halves, ``call``, ``get_attr`` and ``set_attr``. A wait that timed out can be repeated.

    Attributes:
        autoreset_mode: as in Gymnasium.
        env_spec: the ``EnvSpec`` of a single env, or None where it has none that can be carried. Of a hub on the
            network it has the data only: ``gymnasium.make`` refuses it, for its entry points are the hub's choice,
            unless this program has registered the same, and has registered or given all arguments.
    """

    _session: Session

    def __init__(
        self,
        address: str | Secret[str] | None,
        make: Make | Attach,
        options: SessionOptions,
        timeout: float | None = None,
    ) -> None:
        """Make a session and wait until its envs are built, or take one over; arguments and errors as ``Session``."""
        self._session = Session(type(self).__name__, address, make, options, timeout)
        try:
            self._adopt(self._session)
        except BaseException:
            self._session.close(terminate=True, finish=lambda: False)
            raise

    def _adopt(self, session: Session) -> None:
        description = session.description
        self.num_envs = description.num_envs
        self.autoreset_mode = description.autoreset_mode
        self.metadata = {**description.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = description.render_mode
        self.env_spec, self.named = description.env_spec, description.named
        self.single_action_space = description.action_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._flat_actions = spaces.is_flat(self.single_action_space)
        self._frames = Frames(self.num_envs, self.render_mode)
        space, same_step = description.observation_spaces[0], self.autoreset_mode is AutoresetMode.SAME_STEP
        self._observations = Observations(space, self.num_envs, session.values.allow_pickle, same_step)
        self._rewards = Rewards()
        mode = description.observation_mode
        self.single_observation_space = space
        if isinstance(mode, tuple):
            self.observation_space, self.single_observation_space = mode
            spaces.check_equivalent(self.single_observation_space, space, "different")
        elif mode == "different":
            self.observation_space = batch_differing_spaces(description.observation_spaces)
        else:
            self.observation_space = batch_space(space, self.num_envs)

    def adopt_spec(self, spec: EnvSpec | None, arguments: dict[str, Any]) -> None:
        """Say in ``spec`` what was made, as ``gymnasium.make_vec`` does, by the env's spec, else by the one given."""
        self.env_spec = self.env_spec or spec
        if self.env_spec is None:
            return
        self.spec = copy.deepcopy(self.env_spec)
        if (
            spec is not None and not self._session.values.allow_pickle
        ):  # what is run is this program's choice, not the hub's
            for name in ("entry_point", "vector_entry_point", "additional_wrappers"):
                setattr(self.spec, name, copy.deepcopy(getattr(spec, name)))
        mode = "vector_entry_point" if self._session.description.vector else "async"
        self.spec.kwargs = {**arguments, "num_envs": self.num_envs, "vectorization_mode": mode}

    @property
    def closed(self) -> bool:
        """Whether the session is over, or left to another process by ``detach``."""
        return self._session.pending.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._session.pending.closed = closed

    @property
    def address(self) -> str | None:
        """The hub's address or name, as it was given but without its keys; None for a private hub, or none."""
        return self._session.address

    @property
    def lane(self) -> str:
        """How the envs are stepped.

        ``"shared"``, in their workers' own memory, ``"wire"``, by messages, or ``"in-process"``.
        """
        return self._session.lane.name

    @property
    def sizing(self) -> Sizing:
        """How many processes host the envs, and why."""
        return self._session.sizing

    @property
    def num_workers(self) -> int:
        """How many processes host the envs."""
        return self._session.sizing.num_workers

    @property
    def vector(self) -> bool:
        """Whether the envs of each worker are one vector env, whose rows step together."""
        return self._session.description.vector

    @property
    def compression(self) -> str:
        """How observations are compressed on the wire lane; empty for not at all."""
        return self._session.compression

    @property
    def represented(self) -> dict[str, str]:
        """Where in the infos a ``repr`` stood in for a value that no codec carries, and the first one's."""
        return dict(self._observations.represented)

    @property
    def single_reward_space(self) -> Space[Any] | None:
        """The ``reward_space`` of the first env, as envs with several objectives have it.

        It is None where the env has none, for ``vector=True``, and for a hub that cannot tell. Errors as for
        ``call_some``.
        """
        can_tell = self._session.speaks(1) and not self.vector
        return self.get_attr("reward_space", [0])[0] if can_tell and self.has_attr("reward_space", [0])[0] else None

    @property
    def reward_shape(self) -> tuple[int, ...]:
        """The shape of one env's reward, as its ``reward_space`` says; empty for one number, and where it has none.

        Errors as for ``call_some``.
        """
        return getattr(self.single_reward_space, "shape", None) or ()

    def refuse_reward_axes(self, who: str) -> None:
        """Have rewards with axes raise, which ``who`` does not take: at once where ``reward_shape`` has axes.

        Raises:
            ValueError: the envs' reward space has axes. So does each step whose rewards have axes, from now on.
            Exception: as for ``call_some``.
        """
        self._rewards.refused_for = who
        self._rewards.check(self.reward_shape)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """Every env's ``np_random_seed``."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of every env's random generator."""
        return self.get_attr("np_random")

    # --- reset --------------------------------------------------------------------------------------------------------

    @exclusive
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset every env, or those of ``options["reset_mask"]``, and wait.

        Args:
            seed: None, one int (env ``i`` gets ``seed + i``), or one int or None per env.
            options: handed to every env's ``reset``, without ``reset_mask``; or a list with each env's own, or None;
                not modified.

        Returns:
            Batched observations (of envs left out, their last ones) and infos.

        Raises:
            ValueError, TypeError: seeds or mask of the wrong length, shape or type.
            Exception: what an env raised, as its own class or as ``EnvRaised``.
        """
        try:
            self.reset_async(seed, options)
            return self.reset_wait()
        except BaseException as error:
            self._session.pending.forget(error)
            raise

    @exclusive
    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        *,
        masked: bool = True,
        env_ids: Any = None,
    ) -> None:
        """Begin a reset; arguments and errors as for ``reset``.

        With ``env_ids`` only these envs are reset. With them, or without ``masked``, a ``reset_mask`` in the options is
        the envs' own affair.

        Raises:
            ValueError: ``env_ids`` are not different numbers of envs, or come with a list of options.
            SessionBusy: another request is pending.
            SessionClosed: after ``close``.
        """
        resets_all = env_ids is None and not (masked and isinstance(options, dict) and "reset_mask" in options)
        self._session.check_free("reset_async", resets_all=resets_all)
        seeds = seeds_of(seed, self.num_envs)
        if isinstance(options, (list, tuple)):
            if env_ids is not None:
                raise ValueError("options for each env go with a reset of all envs, not with env_ids")
            self._session.require(1, "options for each env")
            reset = Reset(seeds, options_each=[*map(self._options, options_of(options, self.num_envs))])
        elif env_ids is not None:
            selected = np.zeros(self.num_envs, bool)
            selected[checked_env_ids(env_ids, self.num_envs)] = True
            reset = Reset(seeds, [] if selected.all() else selected.tolist(), self._options(options))
        else:
            mask, passed_on = split_mask(options, self.num_envs) if masked else ([], options)
            reset = Reset(seeds, mask, self._options(passed_on))
        self._last_reset = reset
        self._session.begin_reset(reset, resets_all)

    def _options(self, options: dict[str, Any] | None) -> bytes:
        return b"" if options is None else self._session.values.encode(options)

    @exclusive
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset begun by ``reset_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no reset was begun.
        """
        return self._session.pending.wait(AsyncState.WAITING_RESET, self._reset_result, timeout)

    @exclusive
    def reset_each(
        self, seed: Sequence[int | None] | None, options: Options, *, masked: bool = False, env_ids: Any = None
    ) -> tuple[Any, dict[int, dict[str, Any]]]:
        """As ``reset``, but with the infos as each env gave them, by env; an empty one may be left out.

        With ``env_ids`` only these envs are reset. With them, or without ``masked``, a ``reset_mask`` in the options is
        the envs' own affair.
        """
        try:
            self.reset_async(seed, options, masked=masked, env_ids=env_ids)
            return self._session.pending.wait(AsyncState.WAITING_RESET, self._reset_result, None, True)
        except BaseException as error:
            self._session.pending.forget(error)
            raise

    def _reset_result(self, timeout: float | None, by_env: bool = False) -> tuple[Any, Any]:
        batch = self._session.lane.wait(timeout)
        infos = self._infos(batch, by_env)
        return self._observations.batch(batch.observations), infos

    def _infos(self, batch: Batch, by_env: bool) -> dict[Any, Any]:
        infos = self._observations.take(batch)
        return infos.by_env() if by_env else infos.batched(self)

    # --- step ---------------------------------------------------------------------------------------------------------

    @exclusive
    def step(self, actions: Any) -> StepReturn:
        """Step every env once and wait for all of them.

        Args:
            actions: a batch of ``action_space``, as arrays or lists. Neither modified nor checked against bounds.

        Returns:
            Batched observations (the caller's own with ``copy=True``, else a view that holds until the second next
            step or reset), rewards float64 ``(num_envs,)``, with the axes of the envs' rewards if they have any,
            terminations and truncations bool ``(num_envs,)``, and
            infos.

        Raises:
            SpaceMismatch: actions of the wrong count or shape; no env has moved.
            ValueError: rewards have axes, which ``refuse_reward_axes`` refuses.
            WorkerDied: a worker's process ended.
            HubLost: the hub has ended.
            Exception: what an env raised, as its own class or as ``EnvRaised``; ``reset`` goes on.
        """
        try:
            self.step_async(actions)
            return self.step_wait()
        except BaseException as error:
            self._session.pending.forget(error)
            raise

    @exclusive
    def step_async(self, actions: Any) -> None:
        """Begin a step; arguments and errors as for ``step``.

        Raises:
            SessionBusy: another request is pending.
            SessionClosed: after ``close``.
        """
        self._session.check_free("step_async")
        parts = [actions] if self._flat_actions else self._parts(actions, self.num_envs)
        session = self._session
        codes, arrays, elements = pack(parts, session.description.action_leaves, self.num_envs)
        out_of_band = self._packed(elements) if elements else b""
        session.pending.begin(AsyncState.WAITING_STEP, session.lane.begin_step, codes, arrays, out_of_band)

    def _parts(self, actions: Any, count: int) -> list[Any]:
        """The leaves of the actions of so many envs."""
        try:
            return spaces.flatten(self.single_action_space, actions)
        except (LookupError, TypeError, ValueError) as error:
            why = misfit(batch_space(self.single_action_space, count), actions, "actions") or error
            raise SpaceMismatch(f"actions that do not nest as their space does: {why}; no env has moved") from error

    @exclusive
    def step_wait(self, timeout: float | None = None) -> StepReturn:
        """Wait for the step begun by ``step_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no step was begun.
        """
        return self._session.pending.wait(AsyncState.WAITING_STEP, self._step_result, timeout)

    @exclusive
    def step_wait_each(self) -> StepReturn:
        """As ``step_wait``, but with the infos as each env gave them, by env; an empty one may be left out.

        Interrupted, the step is not to be waited for again: the next request drops its result.
        """
        try:
            return self._session.pending.wait(AsyncState.WAITING_STEP, self._step_result, None, True)
        except BaseException as error:
            self._session.pending.forget(error)
            raise

    @exclusive
    def drop_pending(self) -> None:
        """Have nothing pending: the next request drops the result of one that was begun and not waited for."""
        self._session.pending.drop()

    @exclusive
    def step_each(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any]]:
        """As ``step``, but with the infos as each env gave them, by env; an empty one may be left out."""
        try:
            self.step_async(actions)
            return self.step_wait_each()
        except BaseException as error:
            self._session.pending.forget(error)
            raise

    def _step_result(self, timeout: float | None, by_env: bool = False) -> StepReturn:
        arrays, rewards, terminations, truncations, rows, groups, _ = batch = self._session.lane.wait(timeout)
        assert rewards is not None and terminations is not None and truncations is not None
        has_infos = rows or groups or self._observations.loose  # mostly no env has any
        found = self._observations.take(batch) if has_infos else None
        if found is not None or self._rewards.shape:
            rewards = self._rewards.of(rewards, found)
        infos: dict[Any, Any] = {} if found is None else found.by_env() if by_env else found.batched(self)
        observations = arrays[0] if self._observations.flat else self._observations.batch(arrays)
        return observations, rewards, terminations, truncations, infos

    # --- partial batches ----------------------------------------------------------------------------------------------

    def async_reset(self, seed: int | Sequence[int | None] | None = None, options: Options = None) -> None:
        """Begin a reset of every env, whose result ``recv`` returns; arguments and errors as for ``reset``."""
        self.reset_async(seed, options)

    @exclusive
    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Begin a step of some envs, while others may be under way.

        Envs of one share of a vector env begin once all of them are sent; until then they are not under way.

        Args:
            actions: a batch of actions, one per entry of ``env_ids``, of numbers in arrays.
            env_ids: different numbers of envs; None is every env.

        Raises:
            ValueError: an env is under way, or is none of these; no env has moved.
            SpaceMismatch: actions of the wrong count, shape or kind; no env has moved.
            SessionBusy: another request is pending; on the wire lane also a ``recv`` that timed out.
            SessionClosed: after ``close``.
        """
        self._session.check_free("send", among_others=True)
        rows = checked_env_ids(env_ids, self.num_envs)
        codes, arrays, elements = pack(
            self._parts(actions, len(rows)), self._session.description.action_leaves, len(rows)
        )
        if elements:
            raise SpaceMismatch("a part of a batch takes actions of numbers in arrays only; no env has moved")
        self._session.begin_rows(rows, codes, arrays)

    @exclusive
    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> PartReturn:
        """Wait for some of the envs that are under way, and take every one that is done.

        Args:
            min_envs: the fewest to wait for; None is all of them.
            timeout: seconds.

        Returns:
            As ``step``, of the envs that are done, and their numbers, ascending, as ``env_ids``: ``(observations,
            rewards, terminations, truncations, infos, env_ids)``. All arrays are the caller's own, with one entry per
            such env.

        Raises:
            HubTimeout: fewer were done in time; receive again.
            NothingPending: no env is under way.
            WorkerDied, EnvTimeout: an env's process ended, where the policy is to raise: once for each of its envs, in
                place of the env's first result since. That env, ``env_index``, is not under way any more.
            Exception: what an env raised; it is not under way any more, the others are.
        """
        return self._recv(min_envs, timeout, by_env=False)

    @exclusive
    def recv_each(self, min_envs: int | None = None, timeout: float | None = None) -> PartReturn:
        """As ``recv``, but with the infos as each env gave them, by env; an empty one may be left out."""
        return self._recv(min_envs, timeout, by_env=True)

    def _recv(self, min_envs: int | None, timeout: float | None, by_env: bool) -> PartReturn:
        if self._session.pending.state is AsyncState.WAITING_RESET:
            observations, infos = self._session.pending.wait(
                AsyncState.WAITING_RESET, self._reset_result, timeout, by_env
            )
            observations = observations if self._session.options.copy else copy.deepcopy(observations)
            flags = np.zeros(self.num_envs, bool)
            return observations, np.zeros(self.num_envs), flags, flags.copy(), infos, np.arange(self.num_envs)
        self._session.check_free("recv", among_others=True)
        lane = self._session.lane
        self._session.check_received()
        min_envs = None if min_envs is None else operator.index(min_envs)
        if min_envs is not None and min_envs < 1:
            raise ValueError(f"min_envs must be at least 1, got {min_envs}")
        outstanding = lane.outstanding
        batch = lane.wait_rows(min(min_envs or outstanding, outstanding), timeout)
        arrays, rewards, terminations, truncations, _, _, env_ids = batch
        assert rewards is not None and terminations is not None and truncations is not None and env_ids is not None
        found = self._observations.take(batch)
        rewards = self._rewards.of(rewards, found, env_ids.tolist())
        infos = found.by_env() if by_env else found.batched_of(env_ids)
        observations = self._observations.batch(arrays, env_ids.tolist())
        lane.taken(env_ids)
        return observations, rewards, terminations, truncations, infos, env_ids

    def _packed(self, leaves: Sequence[Sequence[Any]]) -> bytes:
        rows = enumerate(zip(*leaves, strict=True))
        return pack_rows((row, self._session.values.encode(list(parts))) for row, parts in rows)

    # --- calls --------------------------------------------------------------------------------------------------------

    @exclusive
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute; one result per env, in order.

        Raises:
            AttributeError: the envs have no such attribute. The session goes on, as after any exception here.
            ValueError: ``reset``, ``step`` and ``close`` are not to be called this way.
            RequestRefused: the name begins with an underscore, and the hub is not private.
            EncodeError: an argument cannot be sent to a hub on the network.
        """
        try:
            self.call_async(name, *args, **kwargs)
            return self.call_wait()
        except BaseException as error:
            self._session.pending.forget(error)
            raise

    @exclusive
    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call.

        Raises:
            SessionBusy: another request is pending.
            SessionClosed: after ``close``.
        """
        self._check_call("call_async", name)
        call = self._call_of(name, args, kwargs)
        self._session.begin_call(call)
        self._pending_call = call

    def _call_of(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], rows: Sequence[int] = ()) -> Call:
        """The call of a method; ``render`` leaves an env alone that was made again and not yet reset."""
        arguments = self._session.values.encode([list(args), kwargs])
        return Call(name, arguments, skip_unreset=name == "render", rows=sorted(rows), apart=True)

    @exclusive
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the call begun by ``call_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no call was begun.
        """
        wanted, deadline = range(self.num_envs), None if timeout is None else Deadline(timeout)
        try:
            results = self._results(self._session.wait_call(timeout), wanted)
        except (WorkerDied, EnvTimeout) as error:
            call = self._rendering_again(error, self._pending_call)
        else:
            if not self._lacks_a_frame(results, self._pending_call):
                return self._completed(results, self._pending_call, wanted)
            call = replace(self._pending_call, reset_first=True)
        self._session.begin_call(call)
        self._pending_call = call
        return self.call_wait(None if deadline is None else deadline.left_s())

    @exclusive
    def call_some(self, env_ids: Any, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As ``call``, of these envs only; one result for each of ``env_ids``. The others are not touched.

        Raises:
            ValueError: ``env_ids`` are not different numbers of envs.
            Exception: as for ``call``; and ``RequestRefused`` by a hub that is too old for this.
        """
        rows = self._checked_rows("call_some", name, env_ids)
        return self._called_at_once(self._call_of(name, args, kwargs, rows), rows)

    def _checked_rows(self, what: str, name: Any, env_ids: Any) -> list[int]:
        """The rows of ``env_ids``, empty for None, which is all; errors as for ``_check_call``, and ``call_some``."""
        self._check_call(what, name)
        if env_ids is None:
            return []
        self._session.require(1, "calls of some envs")
        return [*map(int, checked_env_ids(env_ids, self.num_envs))]

    def _results(self, reply: Reply, wanted: Sequence[int]) -> tuple[Any, ...]:
        """The result of each wanted env, ``NOT_RESET`` where an env was left alone.

        Raises:
            RemoteProtocolError: the reply does not have one result of each of them.
            DecodeError: a result cannot be unpickled.
        """
        try:
            if len(reply.frames) == 1:
                rows: Sequence[tuple[int, Any]] = unpack_rows(reply.frames[0], self.num_envs)
            else:
                rows = [*zip(sorted(wanted), reply.frames, strict=True)]
            if [row for row, _ in rows] != sorted(wanted):
                raise ValueError(f"results of envs {[row for row, _ in rows]}")
        except ValueError as error:
            raise RemoteProtocolError(f"a reply to CALL does not fit the session: {error}") from error
        results = {row: self._session.values.decode(blob) if blob else NOT_RESET for row, blob in rows}
        return tuple(results[row] for row in wanted)

    @exclusive
    def attr_is_callable(self, name: str, env_ids: Any = None) -> tuple[bool, ...]:
        """Whether the attribute of every env, or of these, is a method, or another callable; nothing is called.

        Raises:
            AttributeError: the envs have no such attribute.
            Exception: as for ``call_some``.
        """
        rows = self._checked_rows("attr_is_callable", name, env_ids)
        return self._called_at_once(Call(name, b"", only_kind=True, rows=sorted(rows)), rows)

    @exclusive
    def has_attr(self, name: str, env_ids: Any = None) -> tuple[bool, ...]:
        """Whether every env, or each of these, has the attribute; no method is called, and no value travels.

        Errors as for ``call_some``.
        """
        rows = self._checked_rows("has_attr", name, env_ids)
        self._session.require(1, "has_attr")
        return self._called_at_once(Call(name, b"", rows=sorted(rows), question="exists"), rows)

    @exclusive
    def is_wrapped(self, wrapper: type | str, env_ids: Any = None) -> tuple[bool, ...]:
        """Whether a wrapper of every env, or of each of these, is of this class or extends it.

        ``wrapper`` is the class or its name, ``"module:Class"``. Classes are compared by name, and none is imported.

        Raises:
            TypeError: ``wrapper`` is neither.
            Exception: as for ``call_some``.
        """
        if not isinstance(wrapper, type) and not (isinstance(wrapper, str) and ":" in wrapper):
            raise TypeError(f"is_wrapped takes a class or its name, 'module:Class', got {wrapper!r}")
        name = wrapper if isinstance(wrapper, str) else f"{wrapper.__module__}:{wrapper.__qualname__}"
        self._session.check_free("is_wrapped")
        self._session.require(1, "is_wrapped")
        rows = [] if env_ids is None else [*map(int, checked_env_ids(env_ids, self.num_envs))]
        return self._called_at_once(Call(name, b"", rows=sorted(rows), question="wrapped"), rows)

    def _check_call(self, what: str, name: Any) -> None:
        self._session.check_free(what)
        if not isinstance(name, str):
            raise TypeError(f"the name of a method or attribute is a str, got {name!r}")
        if name.startswith("_") and not self._session.values.allow_pickle:
            raise RequestRefused(
                f"{name!r} begins with an underscore: a hub on the network gives and sets no such attribute of an env, "
                "and calls no such method; use a public name, or a private hub (hub=None)"
            )

    def _called_at_once(self, call: Call, wanted: Sequence[int]) -> tuple[Any, ...]:
        """The results of these envs, or of all if none is named; errors as for ``_results``, and what an env raised."""
        wanted = wanted or range(self.num_envs)
        while True:
            try:
                results = self._results(self._session.call(call), wanted)
            except (WorkerDied, EnvTimeout) as error:
                call = self._rendering_again(error, call)
                continue
            if not self._lacks_a_frame(results, call):
                return self._completed(results, call, wanted)
            call = replace(call, reset_first=True)

    def _completed(self, results: tuple[Any, ...], call: Call, wanted: Sequence[int]) -> tuple[Any, ...]:
        """The results of the call; if it renders, a frame for every env."""
        return self._frames.complete(results, wanted) if call.skip_unreset else results

    def _lacks_a_frame(self, results: tuple[Any, ...], call: Call) -> bool:
        """Whether the call is to be made once more, with ``reset_first``, to see how large frames are."""
        return call.skip_unreset and not call.reset_first and self._frames.lacks_one(results)

    def _rendering_again(self, error: WorkerDied | EnvTimeout, call: Call) -> Call:
        """The call to make after one that ended so: an env that died is made again, and left alone until its reset.

        Raises:
            WorkerDied, EnvTimeout: the error, where the call does not render, or the session's policy is to raise.
        """
        faults = self._session.options.faults
        policy = faults.on_timeout if isinstance(error, EnvTimeout) else faults.on_crash
        if not call.skip_unreset or policy == "raise" or isinstance(error, RestartsExhausted):
            raise error
        if call.reset_first:
            self._frames.give_up()
        return replace(call, reset_first=False)

    @hiding_frames
    def get_attr(self, name: str, env_ids: Any = None) -> tuple[Any, ...]:
        """An attribute of every env, or of these; a method is called. The same as ``call(name)`` or ``call_some``."""
        return self.call(name) if env_ids is None else self.call_some(env_ids, name)

    @exclusive
    def set_attr(self, name: str, values: Any, env_ids: Any = None) -> None:
        """Set an attribute of every env, or of these: one value for all, or a list or tuple with one for each.

        Raises:
            RequestRefused: the name begins with an underscore, and the hub is not private.
            ValueError: a list or tuple of another length.
            Exception: as for ``call_some``.
        """
        rows = self._checked_rows("set_attr", name, env_ids)
        count = len(rows) or self.num_envs
        if not isinstance(values, (list, tuple)):
            values = [values]
        elif len(values) != count:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {count} environments."
            )
        encoded = [self._session.values.encode(value) for value in values]
        if len(encoded) == len(rows):  # the hub takes rows, and with them their values, in ascending order
            encoded = [blob for _, blob in sorted(zip(rows, encoded, strict=True))]
        self._session.set_attr(SetAttr(name, encoded, sorted(rows)))

    @exclusive
    def render(self, env_ids: Any = None) -> tuple[Any, ...]:
        """The rendered frame of every env, or of these; the others are not rendered.

        An env that failed, was made again and was not yet reset shows its last frame; if it never was rendered, a
        blank one. If no env was rendered before, this one is reset, and shows its first frame; its next step or reset
        resets it once more, by the same seed. ``call("render")`` and ``call_some`` do the same, and pass arguments to
        the envs' ``render``.

        Args:
            env_ids: the numbers of envs, all different; None for all. One frame for each, in their order.

        Raises:
            WorkerDied, EnvTimeout: an env died or hung while it rendered, and the policy is to raise.
            Exception: as for ``call_some``.
        """
        rows = self._checked_rows("render", "render", env_ids)
        return self._called_at_once(self._call_of("render", (), {}, rows), rows)

    # --- the session --------------------------------------------------------------------------------------------------

    @property
    def token(self) -> str:
        """The key to this session, with which ``Client.attach`` takes it over or observes it. Keep it as a password."""
        return self._session.token

    @exclusive
    def detach(self) -> str:
        """Leave the session as it is, for another process to take it over by ``Client.attach`` within the hub's lease.

        This vector env is closed then; the envs are not. Returns the session's ``token``.

        Raises:
            RequestRefused: the envs are this program's private hub's, which ends with it.
            HubLost: the hub is known to be lost, and the session with it.
            SessionBusy: a request is pending, or envs are under way.
            SessionClosed: after ``close``.
        """
        self._session.detach()
        return self.token

    @exclusive
    def observe(self) -> Seen:
        """What the envs showed last, such as what another process left; nothing is stepped.

        Raises:
            SessionLost: the session has ended, or was taken over.
        """
        session = self._session
        session.check_free("observe")
        return seen(session.observe(), self._observations)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the session; ``close`` calls this once.

        Args:
            timeout: seconds for a pending request to end; after them the envs are not closed but killed.
            terminate: kill the envs' processes at once.

        What an env's ``close`` raises is logged. Interrupted, it is to be called again.

        Raises:
            LocalProtocolError: another thread is using this vector env; nothing was closed.
        """
        self._session.close(terminate, lambda: self._finish_pending(0 if terminate else timeout))

    def _finish_pending(self, timeout: float | None) -> bool:
        name = self._session.pending.state.value
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

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free the session of a vector env that was not closed; at the program's end its connection's end does it."""
        if not is_finalizing() and hasattr(self, "_session") and not self.closed:
            with contextlib.suppress(Forked):  # it is the parent's
                self.close(terminate=True)
