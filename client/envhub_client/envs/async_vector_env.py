"""``AsyncVectorEnv``: Gymnasium's, over a private hub."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import Space, logger, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import create_shared_memory
from typing_extensions import Unpack

from envhub.errors import raised_by_env
from envhub_client.envs.arguments import check_start_method
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frames import hiding_frames
from envhub_client.keywords import fields_of, hint_of
from envhub_client.option_keywords import OptionKeywords
from envhub_client.session.factories import Factory, checked_factories, make_of_factories
from envhub_client.session.options import (
    FAULT_FIELDS,
    HOSTING_FIELDS,
    FaultOptions,
    HostingOptions,
    ModeName,
    ObservationMode,
    SessionOptions,
)
from envhub_client.session.session import Session


def _log(error: Exception) -> None:
    """Log what an env raised, where upstream logs it, with its texts; no worker is shut down."""
    raised = raised_by_env(error)
    if raised is not None:
        logger.error(f"Received the following error from Worker-{raised.env_index} - Shutting it down")
        logger.error("%s", raised.remote_traceback)  # in which a % is no place for an argument
        logger.error("Raising the last exception back to the main process.")


class AsyncVectorEnv(HubVectorEnv, VectorEnv[Any, Any, np.ndarray]):  # some frameworks look at direct bases only
    """``gymnasium.vector.AsyncVectorEnv``, hosted by a private hub: change the import, keep the program.

    The envs live in worker processes that share neither memory nor descriptors with this program; factories travel by
    cloudpickle. ``client/docs/drop_in.md`` lists what differs.
    """

    @hiding_frames
    def __init__(  # noqa: PLR0913  upstream's, and what says in how many processes
        self,
        env_fns: Sequence[Factory],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Any = None,
        observation_mode: ObservationMode = "same",
        autoreset_mode: ModeName | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | Literal["auto"] | None = None,
        **hosted: Unpack[OptionKeywords],
    ) -> None:
        """Make one env per factory.

        Args:
            env_fns: factories of the envs; called in the workers, never here.
            shared_memory: accepted; observations are in shared memory either way. With it, as upstream, a space that is
                no kind of Gymnasium's is refused.
            copy: whether returned observations are the caller's own.
            context: checked as by upstream, and accepted; workers are always started afresh.
            daemon: accepted; workers always end with this program, and may have children.
            worker: what runs each env: a subclass of ``envhub.EnvRunner``, or its name as ``"module:Class"``.
            observation_mode: ``"same"``, ``"different"`` or ``(batched space, single space)``.
            autoreset_mode: the enum, or its value.
            max_concurrency: the most envs that run at any one time, in as many processes.
            num_workers: processes that host the envs; as for ``envhub.make_vec``.
            **hosted: what is done about envs that fail, see ``envhub.FaultOptions``, and what their workers get, see
                ``envhub.HostingOptions``.

        Raises:
            ValueError: there is no such ``context``, ``worker`` is a function, ``max_concurrency`` no positive integer
                or given besides ``num_workers``, or ``shared_memory`` meets a space that is no kind of Gymnasium's.
            Exception: as for ``envhub.make_vec``.
        """
        if isinstance(worker, str) and not all(worker.partition(":")):
            raise ValueError(f"worker={worker!r} is no name of a class, which is written 'module:Class'")
        if not (worker is None or isinstance(worker, (str, type))):
            raise ValueError(
                "A custom `worker` must accept 8 arguments, says upstream; envhub.AsyncVectorEnv has no such pipes and "
                "memory, and runs no such function. Pass a subclass of envhub.EnvRunner that overrides reset, step or "
                "autoreset, or its name 'module:Class'"
            )
        if max_concurrency is not None and not isinstance(max_concurrency, (int, np.integer)):
            raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
        check_start_method(context)
        fault_options, others = fields_of(FaultOptions, hosted)
        hosting_options, unknown = fields_of(HostingOptions, others)
        for name in unknown:
            raise TypeError(f"{type(self).__name__} takes no {name!r}{hint_of(name, _KEYWORDS)}")
        factories = checked_factories(env_fns)
        if max_concurrency is not None:
            if num_workers is not None:
                raise ValueError("max_concurrency says how many processes there are, and so does num_workers: give one")
            num_workers = int(min(max_concurrency, len(factories)))
        self.env_fns = env_fns
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.observation_mode = observation_mode
        self.max_concurrency = max_concurrency
        options = SessionOptions(
            num_workers=num_workers,
            autoreset_mode=autoreset_mode,  # type: ignore[arg-type]  # the options accept the enum's value, too
            observation_mode=observation_mode,
            copy=copy,
            faults=fault_options,
            hosting=hosting_options,
        )
        make = make_of_factories(factories, worker)
        super().__init__(Session(type(self).__name__, None, make, options))
        if shared_memory and not _is_gymnasiums(self.single_observation_space):
            self.close(terminate=True)
            raise ValueError(
                "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature with "
                "`shared_memory=False` however this is slower."
            )

    def _wait_failed(self, error: Exception) -> None:
        _log(error)
        super()._wait_failed(error)


_KEYWORDS = (*inspect.signature(AsyncVectorEnv).parameters, *FAULT_FIELDS, *HOSTING_FIELDS)


def _is_gymnasiums(space: Space[Any]) -> bool:
    """True if Gymnasium knows how to batch it; upstream refuses to share any other."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return all(map(_is_gymnasiums, parts))
    return create_shared_memory.dispatch(type(space)) is not create_shared_memory.dispatch(object)
