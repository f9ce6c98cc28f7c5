"""The ``envhub`` command."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import cyclopts
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from envhub.core_files import write_no_core_file
from envhub.errors import FULL_TRACEBACKS, EnvHubError, printable
from envhub.hub_options import HubArguments
from envhub.transport.socket_owner import user_text

if TYPE_CHECKING:
    import numpy as np


def _no_empty_path(arguments: cyclopts.ArgumentCollection) -> None:
    """Refuse a path that is empty, as of a variable that is not set: it would stand for the current folder.

    Raises:
        ValueError: there is one.
    """
    for argument in arguments:
        if Path in (argument.hint, *get_args(argument.hint)) and any(not token.value for token in argument.tokens):
            raise ValueError(f"{argument.name}: a path is not empty")


app = cyclopts.App(
    name="envhub",
    help="Gymnasium environments in a hub.",
    version_flags=["--version"],
    default_parameter=Parameter(negative=""),
    group_arguments=cyclopts.Group("Arguments", validator=_no_empty_path),
    group_parameters=cyclopts.Group("Parameters", validator=_no_empty_path),
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
keys_app = cyclopts.App(name="keys", help="The keys that a hub admits.")
app.command(keys_app)
app.register_install_completion_command()

SLOW_S = 0.1  # ``health`` mentions a loop that was busy for longer than this
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_KEYS = 3  # of ``serve``, whose keys cannot be used or let a stranger in


def _positive(type_: object, seconds: float) -> None:
    """Refuse seconds in which nothing can be answered.

    Raises:
        ValueError: they are not positive and finite.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"it takes a positive number of seconds, got {seconds:g}")


Seconds = Annotated[float, Parameter(validator=_positive)]
KeyText = Annotated[str, Parameter(allow_leading_hyphen=True)]  # base64 with ``-``, which may be its first character


def main() -> None:
    """Run the command line."""
    try:
        app(sys.argv[1:])
    except PermissionError as error:
        if error.filename is None or os.environ.get(FULL_TRACEBACKS):
            raise
        path = os.fsdecode(error.filename)
        text = f"{user_text(os.geteuid())} may not use {path}: name another place, or run this as its owner"
        errors.print(f"envhub: {text}", markup=False, soft_wrap=True)
        sys.exit(EXIT_USAGE)


@app.command
def serve(
    *env: str,
    config: Path | None = None,
    options: Annotated[HubArguments | None, Parameter(name="*")] = None,
) -> None:
    """Run a hub until SIGTERM or Ctrl-C.

    Parameters
    ----------
    env
        What to offer: a Gymnasium id, ``module:id``, a pattern of ids, or ``name=module:factory``. Every registered id
        if none is given here and none in the file.
    config
        A TOML file with any of the options below, by the same names with ``_`` for ``-``, and a table ``[envs.NAME]``
        for each env. What the command line says wins.
    """
    from envhub_server.catalog.registry import EnvNotFound
    from envhub_server.hub.hub import Hub
    from envhub_server.network.audit import AuditError
    from envhub_server.processes.import_folder import UnsafeFolder
    from envhub_server.serve import config_of
    from envhub_server.serve import serve as run

    from envhub.errors import AddressError, KeysError

    def ready(hub: Hub) -> None:
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

    def listed(hub: Hub) -> None:
        first = re.sub(r"//(0\.0\.0\.0|\[::\]):", "//HOST:", hub.addresses[0])
        if hub.config.keys is not None and first.startswith("tcp"):
            first = "HOST"
        if name := hub.example():
            hint = f'connect with: envhub.make_vec("{name}", num_envs=64, hub="{first}")'
            console.print(hint, soft_wrap=True)
            return
        for name, why in hub.unready().items():
            console.print(f"unready: {name}: {why}", markup=False, soft_wrap=True)

    try:
        found = config_of(env, options, config)
    except ValueError as error:
        _end("serve", error)
    try:
        run(found, ready, listed)
    except (AddressError, AuditError, EnvNotFound, UnsafeFolder) as error:
        _end("serve", error)
    except KeysError as error:
        _end("serve", error, EXIT_KEYS)


@app.command
def health(address: str | None = None, *, timeout: Seconds = 5.0) -> None:
    """Ask a hub whether it serves; exit with 0 if it does, 1 if it does not answer or is shutting down.

    Parameters
    ----------
    address
        The hub's; without it ENVHUB_ADDRESS, else where ``envhub serve`` listens by default.
    timeout
        Seconds to wait for the answer.
    """
    from envhub_client.client import connect

    from envhub.errors import EnvHubError

    try:
        with connect(address, timeout) as client:
            found = client.health()
    except EnvHubError as error:
        _end("health", error, EXIT_FAILED)
    text = f"{found['sessions']} sessions, up for {found['uptime_s']:.0f} s"
    if (lag_s := found.get("loop_lag_s", 0.0)) >= SLOW_S:
        text += f", busy for up to {lag_s:.1f} s at a time"
    console.print(f"{found['status']}: {text}", markup=False)
    for name, why in found.get("unready", {}).items():
        console.print(f"unready: {name}: {why}", markup=False, soft_wrap=True)
    sys.exit(0 if found["status"] == "ok" else EXIT_FAILED)


@keys_app.command(name="add")
def keys_add(
    name: str, *, keys: Path, may: str | None = None, at: str | None = None, public: KeyText | None = None
) -> None:
    """Admit a client, and print once the address with which it connects; the hub need not be started again.

    Parameters
    ----------
    name
        Of the client. One that exists gets a second key.
    keys
        The folder that ``envhub serve --keys`` names; it is made if need be.
    may
        Its right: observe, use, deploy (any arguments, and factories), or admin (the sessions of all, too). Without
        it a new client may use the hub.
    at
        HOST:PORT at which clients reach the hub; this machine's name and port 5555 without it.
    public
        The client's own public key, as ``envhub keygen`` there prints it; without it a key is made here.
    """
    from envhub_server.network.key_folder import KeyFolder

    from envhub.errors import AddressError, KeysError
    from envhub.transport import sockets
    from envhub.transport.address import parse_hub
    from envhub.transport.keys import HubKeys, key_of, text_of, token_of

    with _with_secrets("keys add"):
        place = at or f"{socket.gethostname()}:5555"
        if ":" not in place:
            raise AddressError(f"--at {place} has no port; write HOST:PORT, such as {place}:5555")
        parse_hub(f"tcp://{place}")  # before a key is admitted that nobody could use
        folder = KeyFolder(keys)
        server = sockets.public_key(folder.make_secret())
        own, secret = (key_of(public), None) if public else sockets.new_key_pair()
        token = text_of(server) if secret is None else token_of(HubKeys(server, secret)).reveal_secret()
        folder.add(name, own, may)
        try:
            if sys.stdout is None:  # its descriptor is closed
                raise OSError("there is no standard output")
            print(f"envhub://{token}@{place}", flush=True)
        except BaseException as error:
            folder.remove(name, own)  # nobody has its secret
            if isinstance(error, OSError):
                raise KeysError(f"no key is added, because its address cannot be printed: {error}") from error
            raise
    errors.print(f"give this to {name}, who runs `envhub login` and pastes it; it is not shown again", soft_wrap=True)


@keys_app.command(name="list")
def keys_list(*, keys: Path) -> None:
    """List the clients that are admitted, their rights and their public keys.

    Parameters
    ----------
    keys
        The folder of keys.
    """
    from envhub_server.network.key_folder import KeyFolder

    from envhub.errors import KeysError
    from envhub.transport.keys import text_of

    with _with_secrets("keys list"):
        if not keys.is_dir():
            raise KeysError(f"there is no folder {keys}; `envhub keys add NAME --keys DIR` makes one")
        folder = KeyFolder(keys)
        names = folder.names()
        problems = folder.passed_over
        for name in names:
            try:
                holder, found = folder.holder(name)
                print(name, holder.right, *map(text_of, found))
            except KeysError as error:
                problems.append(str(error))
        if problems:
            raise KeysError("\n".join(problems))
        if not names:
            errors.print(f"no client is admitted; `envhub keys add NAME --keys {keys}` admits one", soft_wrap=True)


@keys_app.command(name="remove")
def keys_remove(name: str, *, keys: Path, key: KeyText | None = None) -> None:
    """Admit a client no more; its connections end within a second.

    Parameters
    ----------
    name
        Of the client.
    keys
        The folder of keys.
    key
        Only this public key of it.
    """
    from envhub_server.network.key_folder import KeyFolder

    from envhub.transport.keys import key_of

    with _with_secrets("keys remove"):
        KeyFolder(keys).remove(name, None if key is None else key_of(key))


@app.command
def keygen(*, new: bool = False) -> None:
    """Make this user's own key, and print its public half for ``envhub keys add --public``; the secret stays here.

    Parameters
    ----------
    new
        Make another key where there is one. Hubs that are kept go on with the old one until ``envhub login``.
    """
    from envhub_client.connection.known_hubs import make_own_key

    with _with_secrets("keygen"):
        print(make_own_key(new))


@app.command
def login(name: str | None = None) -> None:
    """Keep the address of a hub with its key, asked for unseen, so that ``hub="NAME"`` is enough from then on.

    Parameters
    ----------
    name
        For the hub; its host's without it. A hub that is kept under a name that is given is replaced.
    """
    from envhub_client.client import connect
    from envhub_client.connection import known_hubs

    from envhub.errors import HubUnreachable
    from envhub.transport.address import guarded

    with _with_secrets("login"):
        text = ""
        if sys.stdin is not None:  # it is None where the descriptor is closed
            text = getpass.getpass("envhub:// address: ") if sys.stdin.isatty() else sys.stdin.readline()
        if not text.strip():
            _end("login", "no address was given: paste the one that `envhub keys add` has printed", EXIT_FAILED)
        address = known_hubs.with_own_key(guarded(text.strip()))
        if not name:
            name = known_hubs.name_of(address)
            if known_hubs.keeps_another(name, address):  # whose secret nobody has a second time
                _end("login", f"another hub is kept as {name!r}; give this one a name: envhub login NAME")
        known_hubs.check_name(name)
        try:
            connect(address, timeout=5.0).close()  # nothing is kept of a hub that refuses it
        except HubUnreachable as error:
            errors.print(f"no hub answers there now: {error}", markup=False, soft_wrap=True)
        else:
            console.print("the hub answers")
        known_hubs.keep(name, address)
        console.print(f'kept: hub="{name}"')


@app.command
def logout(name: str) -> None:
    """Remove the address of a hub, with its key, that ``envhub login`` keeps; the hub still admits the key.

    Parameters
    ----------
    name
        Of the hub.
    """
    from envhub_client.connection import known_hubs

    with _errors_in_a_line("logout"):
        known_hubs.forget(name)


@app.command
def ls() -> None:
    """List the hubs that this user can name, the one of ENVHUB_ADDRESS among them, and whether they answer."""
    from concurrent.futures import ThreadPoolExecutor

    from envhub_client.client import connect
    from envhub_client.connection import known_hubs

    from envhub.errors import EnvHubError
    from envhub.transport import address

    def state(hub: Any) -> str:
        try:
            with connect(hub, timeout=2.0) as client:
                return str(client.health()["status"])
        except EnvHubError as error:
            return str(error)

    try:
        of_environment = address.of_environment()
    except EnvHubError as error:
        _end("ls", error)
    hubs = {name: name for name in known_hubs.names()}
    if of_environment is not None:
        hubs.setdefault(address.written(of_environment), of_environment)
    hubs.setdefault(address.default_address(), address.default_address())
    with ThreadPoolExecutor(min(len(hubs), 32)) as threads:  # hubs that do not answer are waited for together
        for name, answer in zip(hubs, threads.map(state, hubs.values()), strict=True):
            console.print(f"{name}: {answer}", markup=False, soft_wrap=True)


@app.command
def envs(address: str | None = None, *pattern: str, timeout: Seconds = 30.0) -> None:
    """List the envs that a hub offers; of at most 16 also their spaces, for which the hub makes one env of each.

    Exits with 1 if there are none.

    Parameters
    ----------
    address
        The hub's, or its name; without it ENVHUB_ADDRESS, else where ``envhub serve`` listens by default.
    pattern
        Which envs: an id, or a pattern of ids such as ``ALE/*``. All without any.
    timeout
        Seconds to wait for each answer of the hub, at most 10, and for the making of each env.
    """
    from envhub_client.tools.env_listing import run

    from envhub.errors import EnvHubError

    try:
        if not run(console, errors, address, pattern, timeout):
            sys.exit(EXIT_FAILED)
    except EnvHubError as error:
        _end("envs", error, EXIT_FAILED)


@dataclass(frozen=True)
class KeptEpisodes:
    """Selection of the episodes that ``record`` keeps.

    Parameters
    ----------
    env_id
        The number of an env to record, from 0 on; may be given more than once. All without it.
    every
        Record of each env every n-th episode, beginning with its first.
    film
        The number of an env to film as well, from 0 on; may be given more than once.
    only_failed
        Record only episodes in which the env failed.
    """

    env_id: tuple[int, ...] = ()
    every: int = 1
    film: tuple[int, ...] = ()
    only_failed: bool = False


ALL_EPISODES = KeptEpisodes()


@app.command
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
        An id, or a name that the hub offers.
    folder
        In which the folder of the recording, recording-vN, is made.
    hub
        Address or name of the hub; without it ENVHUB_ADDRESS, else a hub of its own.
    num_envs
        How many envs are stepped together.
    episodes
        How many episodes of the envs that are recorded are played.
    policy
        module:function, which takes a batch of observations and returns a batch of actions. Random actions by default.
    seed
        Of the envs, and of random actions.
    """
    from envhub_client.tools.record import run

    from envhub.recording.options import RecordOptions

    with _errors_in_a_line("record"):
        try:
            only: Any = "failed" if kept.only_failed else "all"
            options = RecordOptions(folder, kept.env_id or None, kept.every, only, kept.film, episodes_max=episodes)
            options.chosen(num_envs)
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _end("record", f"{folder} cannot be the folder of recordings: {error.strerror}; name another", EXIT_USAGE)
        except ValueError as error:
            _end("record", error, EXIT_USAGE)
        try:
            found = run(env, options, num_envs, hub, policy, seed)
        except BaseException:
            with contextlib.suppress(OSError):  # it has a recording in it
                if is_new:
                    folder.rmdir()
            raise
    text = f"{found.episodes} episodes, {found.nbytes:,} bytes, in {found.folder}; {found.dropped} were dropped"
    console.print(text, soft_wrap=True)


@app.command
def demo() -> None:
    """Learn CartPole-v1 through a hub over tcp, then compare the ways to step it."""
    from envhub_client.tools.demo import run

    with _errors_in_a_line("demo"):
        run(console)


@app.command
def bench(
    *,
    env: list[str] | None = None,
    n: Annotated[str, Parameter(alias="-n")] = "1,16,64",
    seconds: float = 1.0,
    repeats: int = 3,
    json: bool = False,
    plot: Path | None = None,
    budget: bool = False,
) -> None:
    """Time stepping through a hub (embedded, ipc, tcp), AsyncVectorEnv and SyncVectorEnv in one run.

    Where they are installed, SB3, tianshou, PufferLib, EnvPool, dm_env_rpc and OpenEnv take part, too. Needs the
    extra "bench".

    Parameters
    ----------
    env
        A Gymnasium id such as ALE/Pong-v5 or HalfCheetah-v5, or images (84 x 84 x 4 bytes at no cost), busy (1 ms of
        CPU time), busy_100us, unequal (0.1 to 2 ms), wait (waits 10 ms), wait_2ms, wait_random (0.1 to 20 ms) or
        atari (Pong, preprocessed); may be given more than once. CartPole-v1 by default.
    n
        Numbers of envs, separated by commas: any from 1 up, such as 1,4,16,64,256,1024. Ways that take a process for
        each env are left out above 256.
    seconds
        How long each measurement lasts.
    repeats
        How often every way is measured, in turn; medians are shown.
    json
        Print one JSON object per way and number of envs instead of a table.
    plot
        A PNG or SVG file to draw the results into as well.
    budget
        Print instead where the time of one step goes, hop by hop.
    """
    try:
        sizes = [int(size) for size in n.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or not 0 < seconds < math.inf or repeats < 1:
        _end("bench", "-n takes numbers of envs separated by commas, --seconds and --repeats positive ones")
    if budget and (json or plot):
        _end("bench", "--budget goes with --env and -n only")
    with _errors_in_a_line("bench"):
        from envhub_client.tools.bench.bench import run, run_budget
        from envhub_client.tools.bench.plot import check

        if budget:
            run_budget(console, env or ["CartPole-v1"], sizes)
            return
        if plot:
            try:
                check(plot)
            except ValueError as error:
                _end("bench", error)
        run(console, env or ["CartPole-v1"], sizes, seconds, repeats, json, plot)


@app.command
def conformance(
    address: str | None = None,
    *,
    env: list[str] | None = None,
    client: bool = False,
    bind: str = "tcp://127.0.0.1:0",
    case: list[str] | None = None,
    run: str | None = None,
    json: bool = False,
    timeout: Seconds = 30.0,
) -> None:
    """Check from outside that a hub keeps the protocol and Gymnasium's contract; or with --client, that a client does.

    Of a hub, the exit status is 1 if it does not keep them. Of a client, it is 0 if it passed by every rule, 1 if it
    failed by one, and 2 if it failed by none and did not get as far as some, or could not be tested.

    Parameters
    ----------
    address
        The hub's.
    env
        An env to check the hub with; may be given more than once. Without any, the first that the hub offers.
    client
        Test a client in any language: serve a hub that loses, doubles and changes messages. It prints what the client
        has to do.
    bind
        Where that hub listens.
    case
        A case, or a level of PROTOCOL.md (basic, resilient, parts, attach); may be given more than once. Without any,
        all of them.
    run
        The command that runs the client, such as "node client.js", to which the program's name, the address and for
        "attach" a token are added. Without it each case waits until a client connects.
    json
        Print one JSON object per check instead of a table.
    timeout
        Seconds to wait for each answer of the hub; of a client, seconds that a case may take.
    """
    if not 0 < timeout < math.inf:
        _end("conformance", f"--timeout is a positive number of seconds, got {timeout}")
    if client:
        if address is not None or env:
            _end("conformance", "--client serves a hub: it takes no address and no --env")
        from envhub_client.tools.conformance.client_conformance import run as test_client

        try:
            command = shlex.split(run or "")
        except ValueError as error:
            _end("conformance", f"--run {run}: {error}")
        try:
            sys.exit(test_client(console, bind, case or (), command, json, timeout))
        except EnvHubError as error:
            _end("conformance", error)
    if address is None or case or run:
        _end("conformance", "name the address of a hub; or test a client with --client, which --case and --run go with")
    from envhub_client.tools.conformance.conformance import run as test_hub

    with _errors_in_a_line("conformance"):
        if not test_hub(console, address, env or (), json, timeout):
            sys.exit(EXIT_FAILED)


@app.command
def replays(folder: Path | None = None) -> None:
    """List what can be run again of envs that failed, the newest first: name, failure, time, and the client of a key.

    Parameters
    ----------
    folder
        Where a hub keeps them (``envhub serve --replays``); without it the folder of this user's hubs.
    """
    from envhub_server.catalog.replay_folder import files_in
    from envhub_server.replay import in_a_line

    if folder is not None and not folder.is_dir():
        _end("replays", f"there is no folder {folder}; name the one of `envhub serve --replays`, or none")
    for path in files_in(_replay_folder(folder)):
        with contextlib.suppress(FileNotFoundError):  # a hub has removed it meanwhile
            console.print(in_a_line(path), markup=False, soft_wrap=True)


@app.command
def replay(
    file: Path,
    *,
    pdb: Annotated[bool, Parameter(name="--pdb")] = False,
    until: int | None = None,
    video: Path | None = None,
    trust: Annotated[bool, Parameter(name="--trust")] = False,
) -> None:
    """Run an env that failed once more, and say whether it fails alike; exits with 1 if it does not.

    It runs in a process of its own, with the interpreter and in the folder of the env that failed, and is asked what
    that was asked. Steps count from 0, resets included.

    A file names the program and the modules that are run, which is said first. A file that is not yours, or not in the
    folder of your hubs, is run with --trust only.

    Parameters
    ----------
    file
        A file, or a name that ``envhub replays`` lists, and that ``infos["env_failure"]`` has as ``replay``.
    pdb
        Debug: the step that failed, the exception it raised, or with --until that step.
    until
        The step to stop before.
    video
        An MP4 file to render the env into, if it has the mode rgb_array; needs the extra "record".
    trust
        Run what the file names, wherever it comes from.
    """
    from envhub_server.catalog.replay_folder import default_path
    from envhub_server.ipc.replay_file import SUFFIX
    from envhub_server.replay import ReplayError, announced, is_own, run

    if until is not None and until < 0:
        _end("replay", f"--until counts from 0, got {until}", EXIT_USAGE)
    path = file if file.exists() else _replay_folder(None) / f"{file.name.removesuffix(SUFFIX)}{SUFFIX}"
    if not path.exists():
        _end("replay", f"there is neither {file} nor {path}; `envhub replays` lists the names")
    try:
        errors.print(announced(path), markup=False, soft_wrap=True)
        if not trust and not is_own(path, default_path(os.environ)):
            _end("replay", f"{path} is not run, for it is no file of yours in the folder of your hubs; --trust runs it")
        with _film_into(video) as show:
            verdict = run(path, until, pdb, show)
    except ReplayError as error:
        _end("replay", error)
    console.print(printable(verdict.text), markup=False, soft_wrap=True)
    sys.exit(0 if verdict.alike else EXIT_FAILED)


@contextlib.contextmanager
def _film_into(path: Path | None) -> Iterator[Callable[[np.ndarray, float], None] | None]:
    """Open the film in this file, and yield what takes its frames; None without a file."""
    if path is None:
        yield None
        return
    from envhub.recording.film import Film

    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        _end("replay", f"--video {path}: it has to be a file in a folder that exists", EXIT_USAGE)
    films: list[Film] = []

    def show(frame: np.ndarray, fps: float) -> None:
        if not films:
            films.append(Film(path, fps))
        films[0].add(frame[None])

    with _errors_in_a_line("replay"):
        import av  # noqa: F401  so that it is missed before the env is run

        try:
            yield show
        finally:
            for film in films:
                film.finish()


def _replay_folder(folder: Path | None) -> Path:
    from envhub_server.catalog.replay_folder import default_path

    found = folder or default_path(os.environ)
    if found is None:
        _end("replays", "ENVHUB_REPLAYS is off; name the folder")
    return found


def _end(command: str, why: object, status: int = EXIT_USAGE) -> NoReturn:
    errors.print(f"envhub {command}: {why}", markup=False, soft_wrap=True)
    sys.exit(status)


@contextlib.contextmanager
def _with_secrets(command: str) -> Iterator[None]:
    """Have keys in this process, which then leaves no core file; errors as of ``_errors_in_a_line``."""
    write_no_core_file()
    with _errors_in_a_line(command):
        yield


@contextlib.contextmanager
def _errors_in_a_line(command: str) -> Iterator[None]:
    """Print an expected error as one line; any other exception is a bug and shows its traceback."""
    import gymnasium
    from envhub_client.tools.progress import making_bar

    from envhub.errors import EnvHubError

    try:
        with making_bar(Console(stderr=True)):
            yield
    except (EnvHubError, gymnasium.error.Error, ModuleNotFoundError) as error:
        _end(command, error, EXIT_FAILED)
