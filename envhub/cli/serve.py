"""Commands that run envs on this machine: ``serve``, with the checks before it, ``bench``, ``demo`` and ``replay``."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cyclopts import Parameter

from envhub.cli import EXIT_FAILED, EXIT_KEYS, end, print_error, print_json, print_line
from envhub.cli.commands import Count, Seconds, console, errors
from envhub.cli.hubs import HubAddress
from envhub.errors import AddressError, KeysError, hidden, printable
from envhub.options import HubArguments, OptionError


def serve(
    *env: str,
    config: Path | None = None,
    show_config: bool = False,
    check: bool = False,
    check_timeout: Seconds = 120.0,
    json: bool = False,
    options: Annotated[HubArguments | None, Parameter(name="*")] = None,
) -> None:
    """Run a hub until SIGTERM or Ctrl-C.

    It prints where it listens, and a line of Python that connects to it. Without --bind, programs of this user on this
    machine find it by ``envhub.connect()``.

    Parameters
    ----------
    env
        An env to offer: a Gymnasium id such as CartPole-v1, ``module:id`` for an id that a module registers, a pattern
        of ids such as 'ALE/*', or ``name=module:factory``. Without any, here and in the file, every registered id.
    config
        A TOML file with any of the options below, by the same names with ``_`` for ``-``, and a table ``[envs.NAME]``
        for each env. The command line comes before variables such as ENVHUB_SESSIONS_MAX, and these before the file.
    show_config
        Print each setting, where it comes from, and start nothing.
    check
        Make every env once, reset and step it, print what is wrong in a line each, and start no hub; exit with 1 if
        something is wrong.
    check_timeout
        Seconds for each env that --check tries, after which its worker is ended.
    json
        Print as JSON what --show-config or --check prints.
    """
    from envhub_server.catalog.registry import EnvNotFound
    from envhub_server.doctor import Judgement
    from envhub_server.hub.hub import Hub
    from envhub_server.log import HubStream
    from envhub_server.network.descriptor_guard import DescriptorsShort
    from envhub_server.processes.interpreter import UnsafeFolder
    from envhub_server.serve import read_configuration, settings_of
    from envhub_server.serve import serve as run

    def ready(hub: Hub, page: str) -> None:
        for address in hub.addresses:
            console.print(f"listening on {address}", soft_wrap=True)
        if hub.config.keys is not None and hub.addresses[0].startswith("tcp"):
            console.print("clients with a key, see `envhub keys add`, run `envhub login` once")
        if hub.config.allow_factories:
            errors.print(
                "[bold red]factories:[/] workers run code of its own user and of keys that may deploy", soft_wrap=True
            )
        if hub.config.insecure and hub.config.keys is None:
            errors.print("[bold red]insecure:[/] every program that reaches these addresses may use it", soft_wrap=True)
        if page:
            console.print(f"web page at {page}", markup=False, soft_wrap=True)

    def listed(hub: Hub) -> None:
        first = re.sub(r"//(0\.0\.0\.0|\[::\]):", "//HOST:", hub.addresses[0])
        if hub.config.keys is not None and first.startswith("tcp"):
            first = "HOST"
        if name := hub.example():
            num_envs = min(64, hub.config.envs_per_session_max)
            hint = f'connect with: envhub.make_vec("{name}", num_envs={num_envs}, hub="{first}")'
            console.print(hint, soft_wrap=True)
            return
        for name, why in hub.unready().items():
            console.print(f"unready: {hidden(name)}: {why}", markup=False, soft_wrap=True)

    try:
        read = read_configuration(env, options, config)
    except ValueError as error:
        if check:
            _print_judgements([Judgement("configuration", "wrong", str(error))], json)
        end("serve", error)
    for warning in read.warnings:
        print_error(f"envhub serve: {warning}")
    if show_config:
        _print_settings(settings_of(read, config), json)
        return
    if check:
        from envhub_server.validate import check as check_envs

        _print_judgements(check_envs(read.config, check_timeout), json)
    sys.stdout, sys.stderr = HubStream(1), HubStream(2)
    try:
        run(read.config, ready, listed, lambda: read_configuration(env, options, config).config)
    except (AddressError, DescriptorsShort, EnvNotFound, OptionError, UnsafeFolder) as error:
        end("serve", error)
    except KeysError as error:
        end("serve", error, EXIT_KEYS)


def doctor(hub: HubAddress = None, *, json: bool = False) -> None:
    """Look at what a hub needs of this machine, and say what to run where that is missing, which exits with 1.

    Parameters
    ----------
    hub
        Address or name of a hub that is asked, too, and says what it lacks. Without it none is asked.
    json
        Print a JSON list, with an object for each line.
    """
    from envhub_server.doctor import of_hub, of_machine

    judgements = [*of_machine()]
    if hub is not None:
        from envhub_client.client import connect

        with connect(hub) as client:
            judgements += of_hub(client.stats())
    _print_judgements(judgements, json)


def validate(env: str, *, timeout: Seconds = 120.0, config: Path | None = None, json: bool = False) -> None:
    """Try an env in a worker, and say what it does that it should not, which exits with 1, and what it costs.

    Parameters
    ----------
    env
        An env: a Gymnasium id, ``module:id``, or ``module:function``; or with --config a name that the file offers.
    timeout
        Seconds for all of it, after which the worker is ended.
    config
        File of ``envhub serve`` whose options and tables the worker has, as its interpreter.
    json
        Print a JSON object: the lines, and the numbers.
    """
    from envhub_server.validate import validate as run

    try:
        judgements, facts = run(env, timeout, config)
    except ValueError as error:
        end("validate", error)
    _print_judgements(judgements, json, {"env": env, "facts": facts})


def _print_judgements(judgements: Iterable[Any], as_json: bool, more: dict[str, Any] | None = None) -> NoReturn:
    """Print each judgement in a line, or all as JSON with ``more``, and exit; with 1 if something is wrong."""
    verdicts, rows = set(), []
    for each in judgements:
        verdicts.add(each.verdict)
        rows.append(each._asdict())
        if not as_json:
            print_line(hidden(printable(f"{each.verdict:5}  {each.subject}: {each.text}")))
    if as_json:
        print_json(rows if more is None else {**more, "lines": rows})
    sys.exit(EXIT_FAILED if "wrong" in verdicts else 0)


def _print_settings(rows: Sequence[tuple[str, Any, str]], as_json: bool) -> None:
    from json import dumps

    from envhub_client.tools.console import print_rows

    if as_json:
        print_json([{"name": name, "value": value, "origin": origin} for name, value, origin in rows])
    else:
        texts = [(name, "-" if value is None else dumps(value), origin) for name, value, origin in rows]
        print_rows(console, ("name", "value", "origin"), texts)


def bench(
    env: list[str],
    *,
    num_envs: Annotated[str, Parameter(alias="-n")] = "1,16,64",
    seconds: Seconds = 1.0,
    repeats: Count = 3,
) -> None:
    """Time the ways to step your env on this machine, and say which is fastest, and why.

    The ways are Gymnasium's SyncVectorEnv and AsyncVectorEnv, a private hub, and a hub over ipc and over tcp; by shared
    memory, and over tcp by messages. They are timed in turn, in one run.

    Parameters
    ----------
    env
        Env to step, as ``envhub serve`` takes it: a Gymnasium id, ``module:id``, or ``name=module:factory``; may be
        given more than once.
    num_envs
        Numbers of envs, separated by commas, such as 1,4,16,64,256. AsyncVectorEnv is left out above 256, since it
        takes a process for each env.
    seconds
        Seconds that each measurement lasts.
    repeats
        Number of times that every way is measured; medians are shown, and how far the repeats differ.
    """
    try:
        sizes = [int(size) for size in num_envs.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        end("bench", "-n takes numbers of envs separated by commas")
    from envhub_client.tools.bench import run

    run(console, env, sizes, seconds, repeats)


def demo() -> None:
    """Learn CartPole-v1 through a hub over tcp, then compare the ways to step it."""
    from envhub_client.tools import bench

    bench.demo(console)


def replays(folder: Path | None = None) -> None:
    """List the failures of envs that can be run again, the newest first.

    A line has the name that ``envhub replay`` takes, the time and the failure; in a pipe with tabs between them.

    Parameters
    ----------
    folder
        Folder of a hub's replays (``envhub serve --replays``). By default that of this user's hubs.
    """
    from envhub_client.tools.console import print_rows
    from envhub_server.replay import files_in, listed

    if folder is not None and not folder.is_dir():
        end("replays", f"there is no folder {folder}; name the one of `envhub serve --replays`, or none")
    rows, chosen = [], folder or _own_folder()
    for path, _ in files_in(chosen):
        with contextlib.suppress(FileNotFoundError):  # a hub has removed it meanwhile
            rows.append(listed(path))
    print_rows(console, ("name", "time", "failure"), rows)
    if not rows:
        print_error(f"there is no replay in {chosen}")


def replay(
    file: Path,
    *,
    pdb: Annotated[bool, Parameter(name="--pdb")] = False,
    trust: Annotated[bool, Parameter(name="--trust")] = False,
) -> None:
    """Run an env that failed again, and say whether it fails in the same way; exit with 1 if it does not.

    It runs in a process of its own, with the interpreter and in the folder of the env that failed, and gets the
    same requests since a reset. Steps count from 0, resets included.

    A file names the program and the modules that are run, which are printed first. A file that is not yours, or not in
    the folder of your hubs, is run with --trust only.

    Parameters
    ----------
    file
        File, or a name that ``envhub replays`` lists, and that ``infos["env_failure"]`` has as ``replay``.
    pdb
        Start pdb at the step that failed, or at the exception that it raised.
    trust
        Run what the file names, wherever it comes from. It may run any code.
    """
    from envhub_server.ipc.replay_file import SUFFIX
    from envhub_server.replay import ReplayError, announced, default_path, is_own, run

    path = file if file.exists() else _own_folder() / f"{file.name.removesuffix(SUFFIX)}{SUFFIX}"
    if not path.exists():
        end("replay", f"there is neither {file} nor {path}; `envhub replays` lists the names")
    try:
        print_error(announced(path))
        if not trust and not is_own(path, default_path(os.environ)):
            why = "it is no file of yours in the folder of your hubs, or another user could replace it there"
            end("replay", f"{path} is not run, for {why}; --trust runs it")
        verdict = run(path, pdb)
    except ReplayError as error:
        end("replay", error)
    print_line(printable(verdict.text))
    sys.exit(0 if verdict.alike else EXIT_FAILED)


def _own_folder() -> Path:
    from envhub_server.replay import default_path

    folder = default_path(os.environ)
    if folder is None:
        end("replays", "ENVHUB_REPLAYS is off; name the folder")
    return folder
