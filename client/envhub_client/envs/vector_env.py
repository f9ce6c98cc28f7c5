"""``HubVectorEnv``: the vector env over any hub."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector.async_vector_env import AsyncState

from envhub.errors import EnvTimeout, RestartsExhausted, WorkerDied
from envhub.protocol.client import Reply
from envhub.protocol.messages import Call, Failure, Op, Reset, SetAttr, pack_rows, unpack_rows
from envhub.values import spaces
from envhub.values.actions import pack
from envhub.vector_errors import SessionBusy
from envhub_client.connection.failures import raise_failure
from envhub_client.envs.partial import PartialBatches, PartReturn
from envhub_client.envs.reset_arguments import seeds_of, split_mask
from envhub_client.lanes.wire import Outcome
from envhub_client.results.rendered import NOT_RESET
from envhub_client.session.session import HubSession

StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any]]


class HubVectorEnv(HubSession):
    """A vector env whose envs live in a hub: ``gymnasium.vector.VectorEnv`` as of Gymnasium 1.4.

    ``envhub.make_vec`` makes one. Besides the methods of ``VectorEnv`` it has those of ``AsyncVectorEnv``: the
    ``*_async`` and ``*_wait`` halves, ``call``, ``get_attr`` and ``set_attr``. A wait that timed out can be repeated.

    Attributes:
        lane: how the envs are stepped, ``"shared"``, in their workers' own memory, or ``"wire"``, by messages.
        sizing: how many processes host the envs, and why.
        autoreset_mode: as in Gymnasium.
        env_spec: the ``EnvSpec`` of a single env, or None where it has none that can be carried.
    """

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
        try:
            self.reset_async(seed, options)
            return self.reset_wait()
        except BaseException as error:
            self._forget_pending(error)
            raise

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
        self._post(AsyncState.WAITING_RESET, self._lane.post_reset, Reset(seeds, mask, blob))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset begun by ``reset_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no reset was begun.
        """
        found: tuple[Any, dict[str, Any]] = self._wait(AsyncState.WAITING_RESET, self._reset_outcome, timeout)
        return found

    def reset_each(
        self, seed: Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[int, dict[str, Any]]]:
        """As ``reset``, but with the infos as each env gave them, by env; an empty one may be left out.

        A ``reset_mask`` in the options is the envs' own affair.
        """
        try:
            self.reset_async(seed, options, masked=False)
            found: tuple[Any, dict[int, dict[str, Any]]] = self._wait(
                AsyncState.WAITING_RESET, self._reset_outcome, None, True
            )
        except BaseException as error:
            self._forget_pending(error)
            raise
        return found

    def _reset_outcome(self, timeout: float | None, by_env: bool = False) -> tuple[Any, Any]:
        outcome = self._lane.collect(timeout)
        infos = self._infos(outcome, by_env)
        return self._observations.batch(outcome.observations), infos

    def _infos(self, outcome: Outcome, by_env: bool) -> dict[Any, Any]:
        infos = self._observations.take(outcome)
        return infos.by_env() if by_env else infos.batched(self)

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
        try:
            self.step_async(actions)
            return self.step_wait()
        except BaseException as error:
            self._forget_pending(error)
            raise

    def step_async(self, actions: Any) -> None:
        """Begin a step; arguments and errors as for ``step``.

        Raises:
            SessionBusy: another request is pending.
            SessionClosed: after ``close``.
        """
        self._begin("step_async")
        parts = [actions] if self._flat_actions else spaces.flatten(self.single_action_space, actions)
        codes, arrays, elements = pack(parts, self._action_leaves, self.num_envs)
        beside = self._pack_beside(elements) if elements else b""
        self._post(AsyncState.WAITING_STEP, self._lane.post_step, codes, arrays, beside)

    def step_wait(self, timeout: float | None = None) -> StepReturn:
        """Wait for the step begun by ``step_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no step was begun.
        """
        found: StepReturn = self._wait(AsyncState.WAITING_STEP, self._step_outcome, timeout)
        return found

    def step_each(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any]]:
        """As ``step``, but with the infos as each env gave them, by env; an empty one may be left out."""
        try:
            self.step_async(actions)
            found: StepReturn = self._wait(AsyncState.WAITING_STEP, self._step_outcome, None, True)
        except BaseException as error:
            self._forget_pending(error)
            raise
        return found

    def _step_outcome(self, timeout: float | None, by_env: bool = False) -> tuple[Any, ...]:
        observations, rewards, terminations, truncations, rows, columns = outcome = self._lane.collect(timeout)
        says = rows or columns or self._observations.loose  # mostly no env says anything
        infos = self._infos(outcome, by_env) if says else {}
        batch = observations[0] if self._observations.flat else self._observations.batch(observations)
        return batch, rewards, terminations, truncations, infos

    # --- partial batches ----------------------------------------------------------------------------------------------

    def async_reset(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin a reset of every env, whose outcome ``recv`` returns; arguments and errors as for ``reset``."""
        self.reset_async(seed, options)

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Begin a step of some envs, while others may be under way.

        Args:
            actions: a batch of actions, one per entry of ``env_ids``, of numbers in arrays.
            env_ids: different numbers of envs; None is every env.

        Raises:
            ValueError: an env is under way, or is none of these; no env has moved.
            SpaceMismatch: actions of the wrong count, shape or kind; no env has moved.
            SessionBusy: another request is pending; on the wire lane also a ``recv`` that timed out.
            SessionClosed: after ``close``.
        """
        self._begin("send", among_others=True)
        if self._connection.pending is Op.RECEIVE:
            raise SessionBusy(
                "Calling `send` after a `recv` that timed out, which is to be called again first.", "recv"
            )
        self._partial().send(actions, env_ids)

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> PartReturn:
        """Wait for some of the envs that are under way, and take every one that is done.

        Args:
            min_envs: at least so many; None is all of them.
            timeout: seconds.

        Returns:
            As ``step``, of the envs that are done, and their numbers, ascending, as ``env_ids``: ``(observations,
            rewards, terminations, truncations, infos, env_ids)``. All arrays are the caller's own, with one entry per
            such env.

        Raises:
            HubTimeout: not so many in time; receive again.
            NothingPending: no env is under way.
            Exception: what an env raised; it is not under way any more, the others are.
        """
        if self._state is AsyncState.WAITING_RESET:
            observations, infos = self.reset_wait(timeout)
            flags = np.zeros(self.num_envs, bool)
            return observations, np.zeros(self.num_envs), flags, flags.copy(), infos, np.arange(self.num_envs)
        self._begin("recv", among_others=True)
        found: PartReturn = self._partial().recv(min_envs, timeout)
        return found

    def _partial(self) -> PartialBatches:
        return PartialBatches(self._lane, self.single_action_space, self._action_leaves, self._observations)

    def _pack_beside(self, leaves: Sequence[Sequence[Any]]) -> bytes:
        return pack_rows((row, self._encode(list(parts))) for row, parts in enumerate(zip(*leaves, strict=True)))

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute; one result per env, in order.

        Raises:
            AttributeError: the envs have no such attribute. The session goes on, as after any exception here.
            ValueError: ``reset``, ``step`` and ``close`` are not to be called this way.
            EncodeError: an argument cannot be sent to a hub on the network.
        """
        try:
            self.call_async(name, *args, **kwargs)
            return self.call_wait()
        except BaseException as error:
            self._forget_pending(error)
            raise

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call.

        Raises:
            SessionBusy: another request is pending.
            SessionClosed: after ``close``.
        """
        self._begin("call_async")
        _check_name(name)
        call = Call(name, self._encode([list(args), kwargs]))
        self._asking(lambda: self._post(AsyncState.WAITING_CALL, self._connection.send, Op.CALL, call))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the call begun by ``call_async``.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no call was begun.
        """
        reply = self._asking(lambda: self._wait(AsyncState.WAITING_CALL, self._called, timeout))
        return tuple(self._decode(blob) for _, blob in unpack_rows(reply.frames[0], self.num_envs))

    def _called(self, timeout: float | None) -> Reply:
        reply = self._connection.wait(timeout)
        if isinstance(reply.message, Failure):
            raise_failure(reply.message, self._connection.address)
        return reply

    def attr_is_callable(self, name: str) -> tuple[bool, ...]:
        """Whether the attribute of every env is a method, or another callable; nothing is called.

        Raises:
            AttributeError: the envs have no such attribute.
        """
        self._begin("attr_is_callable")
        _check_name(name)
        found: tuple[bool, ...] = self._called_at_once(Call(name, b"", only_kind=True))
        return found

    def _called_at_once(self, call: Call) -> tuple[Any, ...]:
        """The results of the call, ``NOT_RESET`` where an env was left alone."""
        ask = partial(self._connection.ask, Op.CALL, call)
        reply = self._wait(AsyncState.DEFAULT, self._asking, ask)
        rows = unpack_rows(reply.frames[0], self.num_envs)
        return tuple(self._decode(blob) if blob else NOT_RESET for _, blob in rows)

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
        wanted = SetAttr(name, [self._encode(value) for value in values])
        self._asking(lambda: self._connection.ask(Op.SET_ATTR, wanted))

    def render(self) -> tuple[Any, ...]:
        """Every env's rendered frame.

        An env that failed, was made again and was not yet reset shows its last frame; if it never was rendered, a
        blank one.

        Raises:
            WorkerDied, EnvTimeout: an env died or hung while it rendered, and the policy is to raise.
        """
        self._begin("render")
        call = Call("render", self._encode([[], {}]), skip_unreset=True)
        while True:
            try:
                return self._frames.complete(self._called_at_once(call))
            except RestartsExhausted:
                raise
            # The env is made again, and left alone until its reset: the same call does not fail for it again.
            except WorkerDied:
                if self._options.faults.on_crash == "raise":
                    raise
            except EnvTimeout:
                if self._options.faults.on_timeout == "raise":
                    raise


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a method or attribute is a str, got {name!r}")
