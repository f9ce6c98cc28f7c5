"""``HubVectorEnv``: the vector env over any hub."""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex, get_args
from weakref import WeakValueDictionary

import numpy as np
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envhub.errors import Forked, HubTimeout, RequestRefused, SpaceMismatch, ended_by
from envhub.protocol.messages import Reset, pack_rows
from envhub.values import spaces
from envhub.values.actions import pack
from envhub.values.gym_api import MULTI_AGENT
from envhub.vector_errors import NothingPending
from envhub_client.deadline import Deadline
from envhub_client.envs.arguments import (
    EnvIds,
    Origin,
    checked_env_ids,
    options_of,
    parts_of_actions,
    seeds_of,
    split_mask,
)
from envhub_client.envs.callable_vector_env import CallableVectorEnv, Rendering
from envhub_client.envs.observations import Infos, Observations, Rewards, UnreadableRow
from envhub_client.envs.snapshots import Snapshot, SnapshotVectorEnv
from envhub_client.frames import hide_frames
from envhub_client.keywords import check, check_choice
from envhub_client.observer import Seen, seen
from envhub_client.record_options import Recorded
from envhub_client.session.description import Sizing
from envhub_client.session.options import InfoMode
from envhub_client.session.pending import STILL_PENDING, exclusive, repeatable
from envhub_client.session.session import VectorSession

NOT_BATCHED = (
    "multi-agent envs are not batched: envhub.pettingzoo.make gives one as a PettingZoo ParallelEnv "
    "(client/docs/vector_envs.md)"
)

EachOptions = list[dict[str, Any] | None] | tuple[dict[str, Any] | None, ...]
Options = dict[str, Any] | EachOptions | None
StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any]]
PartReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any], np.ndarray]


# Some frameworks look at direct bases only.
class HubVectorEnv(SnapshotVectorEnv, CallableVectorEnv, VectorEnv[Any, Any, np.ndarray]):
    """A vector env whose envs live in a hub: ``gymnasium.vector.VectorEnv`` as of Gymnasium 1.4.

    ``envhub.make_vec`` makes one. Besides the methods of ``VectorEnv`` it has those of ``AsyncVectorEnv``: the
    ``*_async`` and ``*_wait`` halves, ``call``, ``get_attr`` and ``set_attr``. A wait that timed out can be repeated.

    Every method may raise ``SessionClosed``, after ``close``, and an ``EnvHubError`` of its hub, such as ``HubLost``.
    One that begins a request raises ``SessionBusy`` while another one is pending.

    Attributes:
        autoreset_mode: as in Gymnasium.
        env_spec: the ``EnvSpec`` of a single env, or None where it has none that can be carried. Of a hub on the
            network it has the data only: ``gymnasium.make`` refuses it, for its entry points are the hub's choice,
            unless this program has registered the same, and has registered or given all arguments.
    """

    env_spec: EnvSpec | None
    _observers: tuple[StepObserver, ...] = ()
    count_recorded: Callable[[], Recorded] | None = None  # of the recording, if there is one

    def __init__(self, session: VectorSession, origin: Origin | None = None) -> None:
        """Use the envs of this session, and end it with ``close`` or at an error here; ``origin`` is their recipe."""
        self._session = session
        try:
            self._describe()
            if origin is not None:
                self.env_spec = self.env_spec or origin.spec
                self.spec = origin.vector_spec(session.description, trusts_hub=session.values.allow_pickle)
        except BaseException:
            session.close(terminate=True, finish=lambda: None)
            raise

    def _describe(self) -> None:
        session, description = self._session, self._session.description
        self.num_envs = description.num_envs
        self.autoreset_mode = description.autoreset_mode
        self._info_mode = session.options.info_mode
        self._unreferenced, self._owned = [], WeakValueDictionary()
        self.metadata = {**description.metadata, "autoreset_mode": self.autoreset_mode}
        if MULTI_AGENT in self.metadata and (self.num_envs, self.autoreset_mode) != (1, AutoresetMode.DISABLED):
            raise TypeError(NOT_BATCHED)  # ``make`` makes one, which nothing resets
        self.render_mode = description.render_mode
        self.env_spec = description.env_spec
        self.named = description.named
        self.single_action_space = description.action_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._flat_actions = spaces.is_flat(self.single_action_space)
        self._action_leaves = description.action_leaves
        space, mode = description.observation_spaces[0], description.observation_mode
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        trusts_hub = session.values.allow_pickle
        self._observations = Observations(space, self.num_envs, trusts_hub, same_step, session.hub_of)
        self._rewards = Rewards()
        self._rendering = Rendering(self.num_envs, self.render_mode, session.options.faults)
        self.single_observation_space = space
        if isinstance(mode, tuple):
            self.observation_space, self.single_observation_space = mode
            spaces.check_equivalent(self.single_observation_space, space, "different")
        elif mode == "different":
            self.observation_space = batch_differing_spaces(description.observation_spaces)
        else:
            self.observation_space = batch_space(space, self.num_envs)

    @property
    def closed(self) -> bool:
        """True after ``close`` and ``detach``."""
        return self._session.pending.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._session.pending.closed = closed

    @property
    def info_mode(self) -> InfoMode:
        """Form of the infos that ``reset``, ``step`` and ``recv`` return, as for ``envhub.make_vec``.

        It can be assigned, for the results from then on.
        """
        return self._info_mode

    @info_mode.setter
    def info_mode(self, info_mode: InfoMode) -> None:
        check_choice("info_mode", info_mode, get_args(InfoMode))
        self._info_mode = info_mode

    @property
    def address(self) -> str | None:
        """The hub's address or name, as it was given but without its keys; None for a private hub, or none."""
        return self._session.address

    @property
    def lane(self) -> str:
        """Lane by which the envs are stepped: ``"shared"``, in their workers' memory, or ``"wire"``, by messages."""
        return self._session.lane.name

    @property
    def sizing(self) -> Sizing:
        """Number of processes that host the envs, and the reason."""
        return self._session.sizing

    @property
    def num_workers(self) -> int:
        """Number of processes that host the envs."""
        return self._session.sizing.num_workers

    @property
    def recorded(self) -> Recorded:
        """Counts of what ``record=`` has recorded so far; ``AttributeError`` where these envs are not recorded."""
        if self.count_recorded is None:
            raise AttributeError("these envs are not recorded: make them with record=FOLDER")
        return self.count_recorded()

    @property
    def vector(self) -> bool:
        """True if the envs of each worker are one vector env, whose rows step together."""
        return self._session.description.vector

    @property
    def compression(self) -> str:
        """Compression of observations; empty for none, as on the shared lane."""
        return self._session.compression

    @property
    def represented(self) -> dict[str, str]:
        """Places in the infos where a ``repr`` stood in for a value that no codec carries, and the first one's."""
        return dict(self._observations.represented)

    @property
    def reward_shape(self) -> tuple[int, ...]:
        """The shape of one env's reward, as its ``reward_space`` says; empty for one number, and where it has none."""
        return getattr(self.single_reward_space, "shape", None) or ()

    def refuse_reward_axes(self, who: str) -> None:
        """Have rewards with axes raise, which ``who`` does not take: at once where ``reward_shape`` has axes.

        Raises:
            ValueError: the envs' reward space has axes. So does each step whose rewards have axes, from now on.
        """
        self._rewards.refused_for = who
        self._rewards.check(self.reward_shape)

    @exclusive
    def add_observer(self, observer: StepObserver) -> None:
        """Have an ``envhub.StepObserver`` see each reset and step from now on; of several the first one sees it first.

        Raises:
            TypeError: it is none.
            SessionBusy: a request is pending, or envs are under way.
        """
        check(isinstance(observer, StepObserver), "observer", "an envhub.StepObserver", observer, TypeError)
        self._session.check_free("add_observer")
        self._observers = (*self._observers, observer)

    @exclusive
    def remove_observer(self, observer: StepObserver) -> None:
        """Undo ``add_observer``, and close the observer.

        Raises:
            ValueError: it is no observer of these envs.
            SessionBusy: a request is pending, or envs are under way.
        """
        self._session.check_free("remove_observer")
        others = tuple(each for each in self._observers if each is not observer)
        if len(others) == len(self._observers):
            raise ValueError(f"{observer!r} is no observer of these envs")
        self._observers = others
        observer.close()

    @exclusive
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None, env_ids: EnvIds = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Reset every env, those of ``options["reset_mask"]``, or those of ``env_ids``, and wait.

        Args:
            seed: None, one int (env ``i`` gets ``seed + i``), or one int or None per env.
            options: handed to every env's ``reset``, without ``reset_mask``; or a list with each env's own, or None;
                not modified.
            env_ids: different numbers of envs. With them a ``reset_mask`` is an option like any other.

        Returns:
            Batched observations (of envs left out, their last ones) and infos, in the form of ``info_mode``.

        Raises:
            ValueError, TypeError: seeds or mask of the wrong length, shape or type.
            ValueError: ``env_ids`` are not different numbers of envs, or come with a list of options.
            Exception: what an env raised, as its own class or as ``EnvRaised``.
        """
        try:
            self.reset_async(seed, options, env_ids)
            return self.reset_wait()
        except BaseException as error:
            self._forget(error)
            raise

    @exclusive
    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        env_ids: EnvIds = None,
    ) -> None:
        """Begin a reset; arguments and errors as for ``reset``."""
        if env_ids is not None:
            env_ids = checked_env_ids(env_ids, self.num_envs)
        self._session.check_free("reset_async")
        if self._unreferenced:
            self._ask("list")  # which drops them
        seeds = seeds_of(seed, self.num_envs)
        if isinstance(options, (list, tuple)):
            if env_ids is not None:
                raise ValueError("options for each env go with a reset of all envs, not with env_ids")
            if self.vector:
                raise RequestRefused("a vector env takes options for all of its envs, and not for each")
            reset = Reset(seeds, options_each=[*map(self._options, options_of(options, self.num_envs))])
        elif env_ids is not None:
            selected = np.zeros(self.num_envs, bool)
            selected[env_ids] = True
            reset = Reset(seeds, [] if selected.all() else selected.tolist(), self._options(options))
        else:
            mask, passed_on = split_mask(options, self.num_envs)
            reset = Reset(seeds, mask, self._options(passed_on))
        self._last_reset = reset
        try:
            self._session.begin_reset(reset)
        except BaseException as error:  # such as an interrupt, after it was sent
            self._break_off(error)
            raise

    def _options(self, options: dict[str, Any] | None) -> bytes:
        return b"" if options is None else self._session.values.encode(options)

    @repeatable
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[Any, Any]]:
        """Wait for the reset begun by ``reset_async``, for at most ``timeout`` seconds; errors as for ``step_wait``."""
        return self._await_reset(timeout)

    def _await_reset(self, timeout: float | None) -> tuple[Any, dict[Any, Any]]:
        pending, reset = self._session.pending, self._last_reset
        result = pending.wait(AsyncState.WAITING_RESET, self._read_reset, timeout)
        if self._observers:
            self._tell(lambda observer: observer.reset_ended(self, reset, result[0]))
        return result

    def _tell(self, tell: Callable[[StepObserver], None]) -> None:
        """Tell the observers of the result, without those that an interrupted wait has told."""
        pending = self._session.pending
        state, kept, notified = pending.state, pending.kept, pending.notified
        try:
            pending.state = AsyncState.DEFAULT  # an observer may call the envs
            for observer in self._observers[notified:]:
                try:
                    notified += 1  # before: one that is interrupted has missed the result
                    tell(observer)
                except Exception:  # all of them hear of it
                    raise
                except BaseException as interrupt:
                    observer.broken_off(interrupt)
                    raise
        finally:
            pending.state, pending.kept, pending.notified = state, kept, notified

    def _break_off(self, error: BaseException) -> None:
        if not isinstance(error, STILL_PENDING):
            for observer in self._observers:
                observer.broken_off(error)

    def _wait_failed(self, error: Exception) -> None:
        if self._session.pending.state in (AsyncState.WAITING_RESET, AsyncState.WAITING_STEP):
            self._break_off(error)
        hide_frames(error)

    def _forget(self, error: BaseException) -> None:
        if self._session.pending.state is not AsyncState.DEFAULT:
            self._break_off(error)
        self._session.pending.forget(error)

    @exclusive
    def step(self, actions: Any) -> StepReturn:
        """Step every env once and wait for all of them.

        Args:
            actions: a batch of ``action_space``, as arrays or lists. Neither modified nor checked against bounds.

        Returns:
            Batched observations (the caller's own with ``copy=True``, else a view that holds until the second next
            step or reset), rewards float64 ``(num_envs,)``, with the axes of the envs' rewards if they have any,
            terminations and truncations bool ``(num_envs,)``, and infos in the form of ``info_mode``.

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
            self._forget(error)
            raise

    @exclusive
    def step_async(self, actions: Any) -> None:
        """Begin a step; arguments and errors as for ``step``."""
        session = self._session
        session.check_free("step_async")
        parts = [actions] if self._flat_actions else parts_of_actions(self.single_action_space, actions, self.num_envs)
        codes, arrays, elements = pack(parts, self._action_leaves, self.num_envs)
        out_of_band = b""
        if elements:
            encoded = (session.values.encode(list(each)) for each in zip(*elements, strict=True))
            out_of_band = pack_rows(enumerate(encoded))
        try:
            session.pending.begin(AsyncState.WAITING_STEP, session.lane.begin_step, codes, arrays, out_of_band)
            for observer in self._observers:
                observer.step_begun(actions)
        except BaseException as error:  # such as an interrupt, after it was sent
            self._break_off(error)
            raise

    @repeatable
    def step_wait(self, timeout: float | None = None) -> StepReturn:
        """Wait for the step begun by ``step_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no step was begun.
        """
        pending = self._session.pending
        result = pending.wait(AsyncState.WAITING_STEP, self._read_step, timeout)
        if self._observers:
            self._tell(lambda observer: observer.step_ended(self, result))
        return result

    @exclusive
    def drop_pending(self) -> None:
        """Have nothing pending: the next request drops the result of a request that was begun and not waited for."""
        if self._session.pending.drop():
            for observer in self._observers:
                observer.broken_off(None)

    def _read_reset(self, timeout: float | None) -> tuple[Any, dict[Any, Any]]:
        deadline = None if timeout is None else Deadline(timeout)
        batch = self._session.lane.wait(timeout)
        try:
            infos = self._observations.take(batch)
        except UnreadableRow as error:
            return self._read_reset(self._time_without(error, deadline))
        return self._observations.batch(batch.observations), self._laid_out(infos)

    def _read_step(self, timeout: float | None) -> StepReturn:
        deadline = None if timeout is None else Deadline(timeout)
        arrays, rewards, terminations, truncations, rows, groups, _ = batch = self._session.lane.wait(timeout)
        assert rewards is not None and terminations is not None and truncations is not None
        has_infos = rows or groups or self._observations.has_object_leaves  # mostly no env has any
        try:
            infos = self._observations.take(batch) if has_infos else None
            if infos is not None or self._rewards.shape:
                rewards = self._rewards.of(rewards, infos)
        except UnreadableRow as error:
            return self._read_step(self._time_without(error, deadline))
        laid_out = {} if infos is None else self._laid_out(infos)
        observations = arrays[0] if self._observations.flat else self._observations.batch(arrays)
        return observations, rewards, terminations, truncations, laid_out

    def _read_rows(self, min_envs: int, timeout: float | None) -> PartReturn:
        deadline = None if timeout is None else Deadline(timeout)
        batch = self._session.lane.wait_rows(min_envs, timeout)
        arrays, rewards, terminations, truncations, _, _, env_ids = batch
        assert rewards is not None and terminations is not None and truncations is not None and env_ids is not None
        try:
            infos = self._observations.take(batch)
            rewards = self._rewards.of(rewards, infos, env_ids.tolist())
        except UnreadableRow as error:
            return self._read_rows(min_envs, self._time_without(error, deadline))
        observations = self._observations.batch(arrays, env_ids.tolist())
        return observations, rewards, terminations, truncations, self._laid_out(infos, env_ids), env_ids

    def _laid_out(self, infos: Infos, env_ids: np.ndarray | None = None) -> dict[Any, Any]:
        if self._info_mode == "by_env":
            return infos.by_env()
        return infos.batched(self) if env_ids is None else infos.batched_of(env_ids)

    def _time_without(self, error: UnreadableRow, deadline: Deadline | None) -> float | None:
        """The seconds to wait again, now without the hub that sent this row."""
        self._session.lane.breach(error.row, str(error))
        return None if deadline is None else deadline.left_s()

    def async_reset(self, seed: int | Sequence[int | None] | None = None, options: Options = None) -> None:
        """Begin a reset of every env, whose result ``recv`` returns; arguments and errors as for ``reset``."""
        self._check_partial_batches()
        self.reset_async(seed, options)

    def _check_partial_batches(self) -> None:
        for observer in self._observers:
            observer.check_partial_batches()

    @exclusive
    def send(self, actions: Any, env_ids: EnvIds = None) -> None:
        """Begin a step of some envs, while others may be under way.

        Args:
            actions: a batch of actions, one per entry of ``env_ids``, of numbers in arrays.
            env_ids: different numbers of envs; None is every env. Of a vector env all envs of a worker, or none.

        Raises:
            ValueError: an env is under way, or is none of these, or the envs are recorded; no env has moved.
            SpaceMismatch: actions of the wrong count, shape or kind; no env has moved.

        It does not wait for the hub: what that refuses is raised by ``recv``.
        """
        self._check_partial_batches()
        self._session.check_free("send", among_others=True)
        rows = checked_env_ids(env_ids, self.num_envs)
        parts = parts_of_actions(self.single_action_space, actions, len(rows))
        codes, arrays, elements = pack(parts, self._action_leaves, len(rows))
        if elements:
            kinds = sorted({str(getattr(each, "dtype", type(each).__name__)) for each in elements})
            text = f"a part of a batch takes actions of numbers in arrays only, of NumPy's dtypes, and not {kinds}"
            raise SpaceMismatch(f"{text}; no env has moved")
        self._session.begin_rows(rows, codes, arrays)

    @repeatable
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
            RequestRefused, SpaceMismatch: the hub refused a ``send``. Its envs, which the text names, have not moved,
                and are not under way any more; the others are.
            WorkerDied, EnvTimeout: an env's process ended, where the policy is to raise: once for each of its envs, in
                place of the env's first result since. That env, ``env_index``, is not under way any more.
            Exception: what an env raised; it is not under way any more, the others are. Where it raised in a reset that
                ``async_reset`` began, none is.
        """
        session, pending = self._session, self._session.pending
        pending.part = None  # of an interrupted ``recv``
        if pending.state is AsyncState.WAITING_RESET:
            observations, infos = self._await_reset(timeout)
            observations = observations if session.options.copy else copy.deepcopy(observations)
            flags = np.zeros(self.num_envs, bool)
            return observations, np.zeros(self.num_envs), flags, flags.copy(), infos, np.arange(self.num_envs)
        session.check_free("recv", among_others=True)
        if not (outstanding := session.lane.outstanding):
            raise NothingPending("Calling `recv` without any prior call to `send` or `async_reset`.", "recv")
        min_envs = None if min_envs is None else operator.index(min_envs)
        if min_envs is not None and min_envs < 1:
            raise ValueError(f"min_envs must be at least 1, got {min_envs}")
        try:
            part = self._read_rows(min(min_envs or outstanding, outstanding), timeout)
        except Exception as error:
            if env_ids := ended_by(error):
                pending.part = np.array(env_ids)
            raise
        pending.part = part[-1]
        return part

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
            SessionBusy: a request is pending, or envs are under way.
        """
        self._session.detach()
        self._close_observers()
        return self.token

    def _close_observers(self) -> None:
        for observer in self._observers:
            observer.close()

    @exclusive
    def observe(self) -> Seen:
        """Last observations of the envs, such as what another process left; nothing is stepped.

        Raises:
            SessionLost: the session has ended, or was taken over.
        """
        self._session.check_free("observe")
        return seen(self._session.observe(), self.num_envs, self._observations)

    @exclusive
    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the session; ``close`` calls this once.

        An env that takes more than 5 s is a warning, which says what it executes. Ctrl-C ends the wait: the processes
        of envs that are not closed yet are killed, with a warning.

        Args:
            timeout: seconds for a pending request to end and the envs to close; then their processes are killed.
            terminate: kill the envs' processes at once.

        Raises:
            LocalProtocolError: another thread is using this vector env; nothing was closed.
        """
        timeout = 0.0 if terminate else timeout
        deadline = None if timeout is None else Deadline(timeout)
        try:
            self._session.close(terminate, lambda: self._finish_pending(deadline), deadline)
        finally:
            self._close_observers()

    def _finish_pending(self, deadline: Deadline | None) -> None:
        name = self._session.pending.state.value
        logger.warn(f"Calling `close` while waiting for a pending call to `{name}` to complete.")
        with contextlib.suppress(HubTimeout):
            getattr(self, f"{name}_wait")(None if deadline is None else deadline.left_s())

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied; make one where it is used")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_session") and not self.closed:
            with contextlib.suppress(Forked):  # it is the parent's
                self.drop_pending()
                self.close()


class StepObserver:
    """Sees every reset and step of a vector env as the trainer does, in the thread that makes it.

    ``HubVectorEnv.add_observer`` attaches one. Each method does nothing unless a subclass defines it. It may call and
    render the envs, and does not step them. An error of its own is raised to the trainer; the reset or step counts as
    broken off then.
    """

    def check_partial_batches(self) -> None:
        """Check that it can follow ``send``, ``recv`` and ``async_reset``, whose steps and results it does not see.

        Raises:
            ValueError: it cannot, and says what to do instead.
        """

    def step_begun(self, actions: Any) -> None:
        """Note that a step with these actions, which are not modified, has begun."""

    def step_ended(self, envs: HubVectorEnv, result: StepReturn) -> None:
        """Note the result of the step, as it is returned; its infos may be by env."""

    def reset_ended(self, envs: HubVectorEnv, reset: Reset, observations: Any) -> None:
        """Note what the reset shows, as it is returned; ``reset.mask`` has the envs that were reset, empty for all."""

    def snapshot_taken(self, snapshot: Snapshot) -> None:
        """Note that a snapshot was taken. A restore is a reset whose ``snapshot`` is its name."""

    def broken_off(self, error: BaseException | None) -> None:
        """Note that a reset or step that was begun has no result, by this error, or because its caller dropped it."""

    def close(self) -> None:
        """Note that nothing more comes; may be called again."""
