"""Parts that the adapters of several training frameworks share."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import cloudpickle
from gymnasium.spaces import Dict, Space, Tuple
from gymnasium.vector.utils import concatenate, create_empty_array

from envhub_client.envs.vector_env import HubVectorEnv

# In the info of a step that is none of the env's own, such as one that a crash cut short.
INVALID = "invalid_transition"


def refuse_decided(options: Mapping[str, Any], framework: str, *names: str) -> None:
    for name in names:
        if name in options:
            raise TypeError(f"{name} is not to be given: {framework} needs a certain one, and sets it; leave it out")


@contextmanager
def pickle_all(factories: Any, *packages: str) -> Iterator[None]:
    """Have cloudpickle send what factories use of these packages, if it can: else each worker imports PyTorch."""
    with ExitStack() as stack:
        for name in packages:
            package = sys.modules.get(name)
            if package is not None and name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(package)
                stack.callback(cloudpickle.unregister_pickle_by_value, package)
        try:
            cloudpickle.dumps(factories)
        except Exception:
            stack.close()
        yield


def is_composed(space: Space[Any]) -> bool:
    """True if actions of this space have parts; frameworks give them for each env."""
    return isinstance(space, (Dict, Tuple))


def batched(space: Space[Any], actions: Iterable[Any]) -> Any:
    each = list(actions)
    empty: Any = create_empty_array(space, len(each))
    return concatenate(space, each, empty)


def attributes(envs: HubVectorEnv, name: str, rows: list[int]) -> Sequence[Any]:
    """The attribute of each of these envs; of a method a function that calls it in the hub."""
    if not any(envs.attr_is_callable(name, rows)):
        return envs.get_attr(name, rows)
    return [functools.partial(call, envs, row, name) for row in rows]


def call(envs: HubVectorEnv, row: int, name: str, *args: Any, **kwargs: Any) -> Any:
    return envs.call_some([row], name, *args, **kwargs)[0]
