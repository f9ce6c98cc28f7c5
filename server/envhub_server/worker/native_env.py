"""One interface for the vector envs of Gymnasium, ALE and EnvPool, which step all of their envs in one call.

They differ in their use of seeds and masks, and in their own autoreset modes. ``resets_as`` says if their rows can be
reset as the session's autoreset mode demands.
"""

from __future__ import annotations

from itertools import compress
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

from envhub.errors import brief
from envhub.values.gym_api import api
from envhub_server.worker.batch_memory import choose_infos
from envhub_server.worker.gym_compat import parameters_of
from envhub_server.worker.row import DISABLED, NEXT_STEP, SAME_STEP

# Gymnasium 1.0 has no other mode than this one, and its envs do not name it.
_ONLY_MODE = NEXT_STEP if api.__name__ == "gymnasium" and api.__version__.startswith("1.0.") else None
# A user of a VecEnv of Stable-Baselines3, of gym3 or of functions of JAX reads this, too.
OTHERS = (
    "vector=True takes a function of num_envs that returns a gymnasium.vector.VectorEnv, of ALE or an EnvPool; "
    "client/docs/vector_envs.md#other-interfaces shows how another one is put behind that interface"
)
Seeds = Sequence[Optional[int]]
Options = Optional[Dict[str, Any]]
Results = Tuple[Any, Any, Any, Any, Any]  # what ``VectorEnv.step`` returns


class NativeEnv:
    """A ``gymnasium.vector.VectorEnv``: one seed for all of its envs; its spaces and spec are those of one env."""

    knows_masks = False  # whether envs of its class take a mask of those that a reset is for

    def __init__(self, made: Any, rows: Sequence[int], workers: int, make: Callable[..., Any]) -> None:
        self.made, self._make = made, make
        self.rows, self.workers = rows, workers  # of its envs, in the session; how many workers that has
        self.observation_space, self.action_space = made.single_observation_space, made.single_action_space
        self.metadata = {key: value for key, value in (made.metadata or {}).items() if key != "autoreset_mode"}
        self.render_mode = getattr(made, "render_mode", None)  # gym 0.21 has none
        spec = getattr(made, "spec", None)
        self.spec = spec if isinstance(spec, api.envs.registration.EnvSpec) else None
        mode = (made.metadata or {}).get("autoreset_mode", _ONLY_MODE)
        self.autoreset_mode = getattr(mode, "value", mode)  # its own
        self.num_envs = len(rows)
        # Gymnasium demands masks where an env resets by nothing else; and one env is all envs.
        # Whether some of its envs can be reset without the others.
        self.takes_masks = self.autoreset_mode == DISABLED or self.knows_masks or self.num_envs == 1

    @property
    def unwrapped(self) -> Any:
        return getattr(self.made, "unwrapped", self.made)

    def resets_as(self, wanted: str) -> str:
        """The reason why its rows cannot be reset as this autoreset mode demands; empty if they can."""
        name, own = type(self.made).__name__, self.autoreset_mode
        if own not in (NEXT_STEP, SAME_STEP, DISABLED):
            text = f"{name} does not say in metadata['autoreset_mode'] when it resets its envs, but {own!r}"
            return f"{text}, as Gymnasium does since 1.0; {OTHERS}"
        possible = {own}
        if self.takes_masks and own != SAME_STEP:
            possible |= {SAME_STEP, DISABLED}
        if wanted in possible:
            return ""
        line = " or ".join(f"autoreset_mode={mode!r}" for mode in sorted(possible))
        return f"{name} resets its envs as {own!r}; autoreset_mode={wanted!r} is not possible: pass {line}"

    def step(self, actions: Any) -> Results:
        *results, infos = self.made.step(actions)
        return (*results, self._checked(infos))

    def reset(self, seeds: Seeds, num_envs: int, options: Options, rebuilt: bool) -> tuple[Any, Any]:
        """Reset all envs of the session's ``num_envs``; ``rebuilt`` if the seeds are not the program's."""
        seed = seeds[0] if rebuilt else self._seed_of(seeds, num_envs)
        return self._reset(seed=seed, options=options)

    def _seed_of(self, seeds: Seeds, num_envs: int) -> int | None:
        # No two workers get seeds that are nearer to one another than the number of envs of the first.
        if all(seed is None for seed in seeds):
            return None
        first = {None if seed is None else seed - row for row, seed in zip(self.rows, seeds)}
        if len(first) > 1 or None in first:
            text = "this vector env takes one seed for all of its envs, not one each"
            raise ValueError(f"{text}: {brief(list(seeds), 100)}")
        before = sum(len(range(worker, num_envs, self.workers)) for worker in range(self.rows[0]))
        return int(first.pop() or 0) + before

    def _reset(self, **arguments: Any) -> tuple[Any, Any]:
        observations, infos = self.made.reset(**arguments)
        return observations, self._checked(infos)

    def _checked(self, infos: Any) -> Any:
        if not isinstance(infos, dict):
            raise TypeError(f"{type(self.made).__name__} has infos that are a {type(infos).__name__}; {OTHERS}")
        return infos

    def reset_some(self, chosen: np.ndarray, seeds: Seeds, options: Options) -> tuple[Any, Any]:
        if not self.takes_masks:
            text = f"{type(self.made).__name__} resets all of its {self.num_envs} envs or none"
            raise ValueError(f"{text}: it has no reset_mask")
        if self.num_envs == 1:
            return self._reset(seed=None, options=options)
        observations, infos = self._reset(**self._masked(chosen, seeds, options))
        return _chosen_rows(observations, chosen), choose_infos(infos, chosen)

    def _masked(self, chosen: np.ndarray, seeds: Seeds, options: Options) -> dict[str, Any]:
        if any(seed is not None for seed in seeds):
            raise ValueError(f"{type(self.made).__name__} takes a seed for all of its envs, and none for some")
        return {"seed": None, "options": {**(options or {}), "reset_mask": chosen.copy()}}

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        if hasattr(self.made, "call"):
            return list(self.made.call(name, *args, **kwargs))
        attribute = self._attribute(name)
        if not callable(attribute):
            return [attribute] * self.num_envs
        returned = attribute(*args, **kwargs)
        if name != "render" or returned is None:
            return [returned] * self.num_envs
        if len(returned) != self.num_envs:
            raise ValueError(f"{type(self.made).__name__}.render returned {len(returned)} frames of {self.num_envs}")
        return list(returned)

    def is_callable(self, name: str) -> bool:
        if hasattr(self.made, "call"):
            return callable(self.made.envs[0].get_wrapper_attr(name)) if hasattr(self.made, "envs") else True
        return callable(self._attribute(name))

    def _attribute(self, name: str) -> Any:
        return getattr(self.made if hasattr(self.made, name) else self.unwrapped, name)

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        if hasattr(self.made, "set_attr"):
            self.made.set_attr(name, list(values))
            return
        if not all(np.array_equal(value, values[0]) for value in values):
            raise ValueError(f"{name} is an attribute of the vector env, and has one value for all of its envs")
        setattr(self.made, name, values[0])

    def close(self) -> None:
        self.made.close()


class EachSeededEnv(NativeEnv):
    """Gymnasium's ``SyncVectorEnv`` and ``AsyncVectorEnv``: a seed per env."""

    knows_masks = True

    def reset(self, seeds: Seeds, num_envs: int, options: Options, rebuilt: bool) -> tuple[Any, Any]:
        return self._reset(seed=self._seeds(seeds), options=options)

    def _masked(self, chosen: np.ndarray, seeds: Seeds, options: Options) -> dict[str, Any]:
        return {"seed": self._seeds(seeds), "options": {**(options or {}), "reset_mask": chosen.copy()}}

    def _seeds(self, seeds: Seeds) -> Any:
        return list(seeds)


class NumberedEnv(NativeEnv):
    """Its infos have the numbers of envs, as ``env_id``, which in a share of a session are not the session's."""

    def _checked(self, infos: Any) -> Any:
        checked = super()._checked(infos)
        return self._of_session(checked) if self.workers > 1 else checked

    def _of_session(self, infos: dict[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = {
            key: self._of_session(value) if isinstance(value, dict) else value for key, value in infos.items()
        }
        if (ids := own.get("env_id")) is not None:
            own["env_id"] = np.asarray(self.rows, ids.dtype)[ids]
        return own


class AleEnv(NumberedEnv, EachSeededEnv):
    """``ale_py.vector_env.AtariVectorEnv``: an array of seeds, of the envs that are reset; -1 is none."""

    def _masked(self, chosen: np.ndarray, seeds: Seeds, options: Options) -> dict[str, Any]:
        return {**super()._masked(chosen, seeds, options), "seed": self._seeds([*compress(seeds, chosen)])}

    def _seeds(self, seeds: Seeds) -> Any:
        return np.array([-1 if seed is None else seed for seed in seeds])


class EnvPoolEnv(NumberedEnv):
    """An EnvPool by its ``gymnasium`` interface: it is seeded when it is made, so a reset by seeds makes it again."""

    knows_masks = True

    def reset(self, seeds: Seeds, num_envs: int, options: Options, rebuilt: bool) -> tuple[Any, Any]:
        if any(seed is not None for seed in seeds):
            if not takes(self._make, "seed", by_name=False):
                raise ValueError("an EnvPool is seeded when it is made: its factory should take seed, and pass it on")
            if None in seeds:
                raise ValueError("an EnvPool is seeded when it is made: a reset needs a seed for each of its envs")
            self.made.close()
            self.made = self._make(num_envs=self.num_envs, seed=list(seeds))
        return self._reset(options=options)

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        # Unless envs are named, it renders its first one only.
        asked = {"env_ids": list(range(self.num_envs)), **kwargs} if name == "render" and not args else kwargs
        return super().call(name, args, asked)

    def reset_some(self, chosen: np.ndarray, seeds: Seeds, options: Options) -> tuple[Any, Any]:
        return self._reset(**self._masked(chosen, seeds, options))  # which returns no others


def made_by(make: Callable[..., Any], rows: Sequence[int], build: Any) -> NativeEnv:
    # ``make`` takes ``num_envs``, as a ``vector_entry_point`` of Gymnasium does.
    made = _made(make, len(rows), build.autoreset_mode)
    if problem := why_not_batch(made, len(rows)):
        raise TypeError(f"the factory of a vector env returned {problem}")
    kind = NativeEnv
    if _is_of(made, "gymnasium.vector.sync_vector_env", "gymnasium.vector.async_vector_env"):
        kind = EachSeededEnv
    elif _is_of(made, "ale_py.vector_env"):
        kind = AleEnv
    elif _is_of(made, "envpool.python.envpool"):
        kind = EnvPoolEnv
    env = kind(made, rows, build.batch_workers, make)
    if problem := env.resets_as(build.autoreset_mode):
        raise ValueError(problem)
    return env


def _made(make: Callable[..., Any], num_envs: int, autoreset_mode: str) -> Any:
    if not takes(make, "num_envs", by_name=False):
        raise TypeError(f"{brief(make, 100)} takes no num_envs; {OTHERS}")
    if not takes(make, "autoreset_mode") or not hasattr(api.vector, "AutoresetMode"):
        return make(num_envs=num_envs)
    try:
        return make(num_envs=num_envs, autoreset_mode=api.vector.AutoresetMode(autoreset_mode))
    except ValueError:
        if autoreset_mode != DISABLED:
            raise
        return make(num_envs=num_envs)  # ALE knows no other than its two, of which masks can make this one


def why_not_batch(made: Any, num_envs: int) -> str:
    attributes = ("num_envs", "single_observation_space", "single_action_space", "reset", "step")
    missing = [name for name in attributes if not hasattr(made, name)]
    if missing:
        is_single = hasattr(made, "step") and not hasattr(made, "num_envs")
        single = "a single env, which vector=True is not for: " if is_single else ""
        return f"{single}{brief(made, 100)}, which is no vector env: it has no {', '.join(missing)}; {OTHERS}"
    if made.num_envs != num_envs:
        return f"a vector env of {made.num_envs} envs where num_envs={num_envs} was given to it"
    config = getattr(made, "config", None)  # of EnvPool
    batch_size = config.get("batch_size") if isinstance(config, dict) else getattr(made, "batch_size", None)
    if batch_size not in (None, num_envs):
        return f"a vector env with batch_size={batch_size}; EnvHub steps all of its {num_envs} envs in one call"
    return ""


def takes(make: Callable[..., Any], name: str, by_name: bool = True) -> bool:
    """True if a function has an argument of this name; without ``by_name`` also if it may take any."""
    parameters = parameters_of(make)
    return name in parameters or (not by_name and any(each.kind is each.VAR_KEYWORD for each in parameters.values()))


def _is_of(made: Any, *modules: str) -> bool:
    env = getattr(made, "unwrapped", made)
    return any(kind.__module__ in modules for kind in type(env).__mro__)


def _chosen_rows(observations: Any, chosen: np.ndarray) -> Any:
    if isinstance(observations, dict):
        return {key: _chosen_rows(part, chosen) for key, part in observations.items()}
    if isinstance(observations, tuple):
        return tuple(_chosen_rows(part, chosen) for part in observations)
    return np.asarray(observations)[chosen]


class SharedCall:
    """A call of the vector env on behalf of several of its envs."""

    def __init__(self, env: NativeEnv, whole: bool, reset_early: Callable[[], None]) -> None:
        self.env, self._whole, self._reset_early = env, whole, reset_early
        self._early: BaseException | bool = False  # whether all envs were reset early, or what that raised
        self._returned: list[Any] | None = None
        self._values: dict[int, Any] = {}

    def returned(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        if self._returned is None:
            self._returned = self.env.call(name, args, dict(kwargs or {}))
        return self._returned

    def reset_early(self) -> None:
        """Reset all of the envs at once; what that raises is raised for each of them, without another try."""
        if self._early is False:
            try:
                self._reset_early()
                self._early = True
            except BaseException as error:
                self._early = error
        if isinstance(self._early, BaseException):
            raise self._early

    def check_whole(self, name: str) -> None:
        if not self._whole:
            raise ValueError(f"{name!r} is the vector env's, and not of some of its envs only")

    def set(self, number: int, name: str, value: Any) -> None:
        self.check_whole(name)
        self._values[number] = value
        if len(self._values) == self.env.num_envs:
            self.env.set_attr(name, list(self._values.values()))


class SubEnv:
    """One env of a vector env, as a call on it sees it."""

    def __init__(self, index: int, number: int, shared: SharedCall, fresh: bool) -> None:
        self.index = self.bits = index
        self.env = self
        self.vector_env, self.reset_early = shared.env.made, shared.reset_early
        self.awaits_first_reset = fresh
        self._number, self._shared = number, shared

    def get_wrapper_attr(self, name: str) -> Any:
        if not self._shared.env.is_callable(name):
            return self._shared.returned(name)[self._number]
        if name != "render":
            self._shared.check_whole(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._shared.returned(name, args, kwargs)[self._number]

        return call

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        self._shared.set(self._number, name, value)
