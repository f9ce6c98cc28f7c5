"""Command ``envhub record``."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from envhub.cli.terminal import EXIT_USAGE, end, errors_in_a_line, print_line


@dataclass(frozen=True)
class KeptEpisodes:
    """Selection of the episodes that ``record`` keeps.

    Parameters
    ----------
    env_id
        Number of an env to record, from 0 on; may be given more than once. All envs by default.
    every
        Record every n-th episode of each env, beginning with its first.
    film
        Number of an env to film as well, from 0 on; may be given more than once.
    only_failed
        Record only episodes in which the env failed.
    """

    env_id: tuple[int, ...] = ()
    every: int = 1
    film: tuple[int, ...] = ()
    only_failed: bool = False


ALL_EPISODES = KeptEpisodes()


def record(
    env: str,
    folder: Path,
    *,
    hub: str | None = None,
    num_envs: Annotated[int, Parameter(alias="-n", validator=Number(gte=1))] = 4,
    episodes: int = 10,
    policy: str = "",
    seed: int = 0,
    kept: Annotated[KeptEpisodes, Parameter(name="*")] = ALL_EPISODES,
) -> None:
    """Play episodes of an env and record them on this machine, as a Minari data set. Needs the extra "record".

    Parameters
    ----------
    env
        Env to play: an id, or a name that the hub offers.
    folder
        Folder in which the folder of the recording, recording-vN, is made.
    hub
        Address or name of the hub; without it ENVHUB_ADDRESS, else a hub of its own.
    num_envs
        Number of envs that are stepped together.
    episodes
        Number of episodes to play, of the envs that are recorded.
    policy
        ``module:function``, which takes a batch of observations and returns a batch of actions; the current folder is
        searched for the module, too. Random actions by default.
    seed
        Seed of the envs, and of random actions.
    """
    from envhub_client.tools.record import run

    from envhub.recording.options import RecordOptions

    with errors_in_a_line("record"):
        try:
            only: Any = "failed" if kept.only_failed else "all"
            options = RecordOptions(folder, kept.env_id or None, kept.every, only, kept.film, episodes_max=episodes)
            options.chosen(num_envs)
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            end("record", f"{folder} cannot be the folder of recordings: {error.strerror}; name another", EXIT_USAGE)
        except ValueError as error:
            end("record", error, EXIT_USAGE)
        try:
            recorded = run(env, options, num_envs, hub, policy, seed)
        except BaseException:
            with contextlib.suppress(OSError):  # it has a recording in it
                if is_new:
                    folder.rmdir()
            raise
    text = f"{recorded.episodes} episodes, {recorded.nbytes:,} bytes, in {recorded.folder}"
    print_line(f"{text}; {recorded.dropped} were dropped")
