"""The options of a hub, with their bounds, defaults and help: the one place for the command line, the file and the hub.

``envhub serve`` takes each from the command line, from a variable such as ``ENVHUB_SESSIONS_MAX``, and from a file with
``_`` for ``-``, in this order. An annotation says what is allowed, as ``msgspec`` checks it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, make_dataclass
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Any, List, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from envhub.errors import ONLY_PROGRAMS_RECORD
from envhub.protocol.validation import GPUS_MAX, HUB_NAME_CHARS_MAX, ROWS_MAX, SECONDS_MAX, is_function_name
from envhub.transport import address

MIB = 1 << 20
# What was an option, and the way that is left.
RETIRED = {
    "announce": address.NO_ANNOUNCEMENTS,
    "replays_max": "the files of replays are limited by their bytes (replays_bytes_max), and 0 keeps none",
    "audit": "there is no audit file any more: the lines of the hub's log with audit=true say who did what",
    "record": ONLY_PROGRAMS_RECORD,
    "worker_memory_bytes_max": "a key has no quota of its workers' memory any more: memory_max limits each worker",
}
VARIABLES = "ENVHUB_"
# Variables with this beginning that are no options of a hub, and of replays, which ``replay.default_path`` reads.
OTHER_VARIABLES = (
    *("ADDRESS", "ENV_INDICES", "FULL_TRACEBACKS", "LANE", "NUM_WORKERS", "REPLAYS", "SESSION", "SPIN_US", "SSH"),
    *("WEB_PASSWORD", "WORKER", "WORKER_INDEX"),
)
NEAR = 0.9  # similarity from which on the name of a variable is taken for that of an option with a mistake in it
PROCESSES_MAX = 1024  # workers or spares of a session, as many as it may have envs
CPUS_MAX = 1 << 16
BYTES_MIN = 16 << 20  # of memory, in which an interpreter just starts
BYTES_MAX = 1 << 50  # of memory or of files: a petabyte
EPISODES_MAX = 1 << 40
COUNT_MAX = 1 << 50
SLOW_MS_MAX = 1 << 32  # 49 days
VALUE_CHARS_MAX = 60  # of a value in an error

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[f"{_letter}B"], _UNITS[f"{_letter}IB"] = 1000**_power, 1024**_power
_NUMBER_OF_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?I?B|)", re.IGNORECASE)


def byte_count(value: Any, folder: Path = Path()) -> Any:
    """The bytes in a text such as ``2GB``, ``512MiB`` or ``4096``; what is no text as it is. Raises ``ValueError``."""
    if not isinstance(value, str):
        return value
    match = _NUMBER_OF_BYTES.fullmatch(value.strip())
    count = Fraction(match[1]) * _UNITS.get(match[2].upper(), 0) if match else Fraction(0)
    if match is None or match[2].upper() not in _UNITS or count.denominator != 1:
        raise ValueError(f"{value!r} is no number of bytes; write it such as 2000000000, 2GB or 512MiB")
    return int(count)


def read_memory(value: Any, folder: Path) -> Any:
    count = byte_count(value)
    if isinstance(count, int) and 0 < count < BYTES_MIN:
        raise ValueError(
            f"{value!r} is less than {BYTES_MIN} bytes, in which an interpreter just starts; 0 is no limit"
        )
    return count


def no_path(text: str) -> str:
    if not text:  # in a file it would stand for the file's folder
        return "a path is not empty"
    return "a path is no URL" if "://" in text else ""


def read_path(text: str, folder: Path) -> Path:
    """The path that is written so, with ``~`` for a home folder, or one in the folder; raises ``ValueError``."""
    if why := no_path(text):
        raise ValueError(why)
    if "\0" in text:
        raise ValueError(f"{text!r} has a null character")
    try:
        return folder / Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text!r} begins with no known home folder") from error


def read_program(text: str, folder: Path) -> str:
    """A path if the text is one or the folder has the program, or else a command."""
    path = os.path.join(folder, read_path(text, Path())) if text else ""
    return path if "/" in text or os.path.exists(path) else text


def _checked_by(check: Callable[[str], Any]) -> Callable[[str, Path], str]:
    def read(text: str, folder: Path) -> str:
        check(text)
        return text

    return read


def read_function(text: str, folder: Path) -> str:
    if text and not is_function_name(text):
        raise ValueError(f"{text!r} names no function; expected module:function")
    return text


def read_variable(text: str, folder: Path) -> str:
    """Read the name of a variable; errors are without its value, which may be secret."""
    if not text or "=" in text or "\0" in text:
        raise ValueError("the name of a variable is not empty, and has no '=' and no null character")
    return text


def parse_arguments(text: str) -> tuple[str, frozenset[str]]:
    """The pattern of names and the arguments of ``name=argument,argument``; raises ``ValueError``."""
    pattern, _, listed = text.rpartition("=")
    names = frozenset(listed.split(","))
    if not pattern or not all(map(str.isidentifier, names)):
        raise ValueError(f"{text!r} should read name=argument,argument")
    return pattern, names


def _read_by(read: Callable[[Any, Path], Any], low: int | None = None, high: int | None = None) -> Meta:
    """Return bounds, and the function that makes the value of what is written, and of the folder of paths."""
    return Meta(ge=low, le=high, extra={"read": read})


Address = Annotated[str, _read_by(_checked_by(address.parse))]
# Of a list in a variable, a comma before the next pattern separates two, and the others are between names.
Arguments = Annotated[str, _read_by(_checked_by(parse_arguments)), Meta(extra={"separator": r",(?=[^,]*=)"})]
Bytes = Annotated[int, _read_by(byte_count, 0, BYTES_MAX)]
SomeBytes = Annotated[int, _read_by(byte_count, 1, BYTES_MAX)]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Cpus = Annotated[int, Meta(ge=1, le=CPUS_MAX)]
Envs = Annotated[int, Meta(ge=1, le=ROWS_MAX)]
Function = Annotated[str, _read_by(read_function)]
Gpu = Annotated[int, Meta(ge=0, le=GPUS_MAX - 1)]
HubName = Annotated[str, Meta(max_length=HUB_NAME_CHARS_MAX, pattern=r"^[ -~]*\Z")]
InfoBytes = Annotated[int, _read_by(byte_count, 1 << 10, 32 << 20)]
Memory = Annotated[int, _read_by(read_memory, 0, BYTES_MAX)]
MessageBytes = Annotated[int, _read_by(byte_count, 1 << 16, 1 << 30)]
Origin = Annotated[str, Meta(pattern=r"^(https?://[^/?#@\s]+)?\Z")]
Program = Annotated[str, _read_by(read_program)]
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Spares = Annotated[int, Meta(ge=0, le=PROCESSES_MAX)]
VariableName = Annotated[str, Meta(pattern=r"^[^=\x00]+$", extra={"read": read_variable})]
VariableValue = Annotated[str, Meta(pattern=r"^[^\x00]*$")]
WebAddress = Annotated[str, _read_by(_checked_by(lambda text: address.parse_bind(f"tcp://{text}")))]
Workers = Annotated[int, Meta(ge=1, le=PROCESSES_MAX)]


# --- the options ------------------------------------------------------------------------------------------------------


class RecycleOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table ``recycle``: bounds after which another worker takes over; 0 for never.

    Attributes:
        episodes: After this number of episodes of its envs together; 0, the default, for never.
        age_s: After this number of seconds; 0, the default, for never.
        memory_bytes: With more bytes of memory than these, such as 2GB; 0, the default, for never.
    """

    episodes: Annotated[int, Meta(ge=0, le=EPISODES_MAX)] = 0
    age_s: Seconds = 0.0
    memory_bytes: Memory = 0


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Options of a hub besides its envs. A field is an option of ``envhub serve``, and a key of its file.

    Attributes:
        bind: Where to listen: ``tcp://HOST:PORT`` (port 0 takes a free one) or ``ipc://PATH``; may be given more than
            once.
        name: The hub's name for its clients and its log, of at most 64 printable characters of ASCII. Without it, the
            name of the machine.
        python: The interpreter of envs that name none: a program, a virtual environment or a conda prefix, of Python
            3.8 or later. Without it, the hub's own.
        rendering: The way to draw frames without a screen, for envs that name none: by a GPU or Mesa (egl), or by the
            CPU (osmesa). Tried at the start.
        vector: Take the envs of the command line as vector envs, as ``vector`` of a table does.
        workers: The number of workers of a session that asks for none. By default, or with auto, envs that may share a
            process have one per CPU, and others one each.
        cpus: The number of CPUs that the hub plans with. By default all that it may use.
        worker_memory: The bytes of memory that each worker may allocate, such as 2GB or 512MiB; an env that wants more
            gets a MemoryError. 0, the default, for no limit.
        worker_env: A variable of the environment that workers get, too; may be given more than once. Without it they
            get only what programs need to run, such as PATH and HOME.
        keys: The folder of keys that ``envhub keys`` makes. Every tcp address then admits only their holders, and may
            be one that other machines can reach. Changes of the folder count at once.
        insecure: Allow an address that other machines can reach, though nothing guards it.
        allow_factories: Run factories that clients send, for the own user and keys with the right deploy.
        allow_arguments: Arguments of an env to which any client may give any value: ``ENV=NAME,NAME``, where ENV may be
            a pattern; may be given more than once.
        verbose_errors: Name folders of this machine in the errors of all clients, and not of the hub's own user alone.
        gpus: A device that workers get in turn, by CUDA_VISIBLE_DEVICES and the variables of EGL; may be given more
            than once. Clients choose among them.
        memory_max: The bytes of memory that each worker may have, with what it started; one that has more is ended.
            Clients may ask for less. 0, the default, for no limit.
        spares: The number of workers of each session that are made ahead, 0 by default. Clients may choose another
            number, up to spares_max.
        recycle: When another worker takes over from one: after ``episodes`` of its envs together, ``age_s`` seconds, or
            with more than ``memory_bytes``, as ``--recycle.memory-bytes 2GB``; 0 for never.
        sessions_max: The number of sessions that may exist at one time.
        max_envs: The number of envs that may exist at one time.
        envs_per_session_max: The number of envs that a session may have.
        spares_max: The number of spares that a client may ask for, where spares says no larger number.
        arena_bytes_max: The bytes of shared memory of all sessions together, in which observations and actions lie.
        message_bytes_max: The bytes of one frame that a client sends, and of the results of a call that travel as one
            frame.
        info_bytes_max: The bytes of an info, besides the observation in it.
        log: The file for the log, as lines of JSON, in place of stderr. It is made with mode 0600, and opened again
            after a rotation.
        replays: The folder for the replays of envs that failed, which ``envhub replay`` runs again. By default that of
            ENVHUB_REPLAYS, else ``envhub/replays`` in the user's folder for state.
        replays_bytes_max: The bytes of all files there; older ones are removed, and with 0 none is kept.
        trace_bytes_max: The bytes of shared memory per env for what it was asked since a reset, which a replay runs
            again. With 0 no replay is kept.
        snapshots_max: The processes of a session that may be snapshots of envs. 0 forbids snapshots.
        slow_ms: The milliseconds from which on a step, a reset or a call is in the list of slow ones. 0 for no list.
        web: Where to serve a page that shows and ends sessions, and metrics: HOST:PORT (port 0 takes a free one). It
            needs the extra ``web``. Any host but one of loopback wants a password.
        web_password_file: A file with the password of the page, and in a second line, if any, of those who may only
            look. Without it that of ENVHUB_WEB_PASSWORD; without both, the address that is printed has a token.
        web_proxy: The origin at which browsers see the page, such as https://hub.example.org, where a reverse proxy
            asks for passwords.
        web_films: A folder of recordings, whose films the page shows.
        lease: The seconds that a session outlives the loss of its client.
        close_timeout_max: The most seconds that a client may give an env to close.
        drain_timeout: The seconds for requests to end, once the hub is told to stop.
        drain_close_timeout: The seconds for envs to close after that; then their workers are killed.
        log_level: The lines of the log that are written: these, and the more important ones.
    """

    bind: tuple[Address, ...] = ()
    name: HubName = ""
    python: Program = ""
    rendering: Literal["egl", "osmesa"] | None = None
    vector: bool = False
    workers: Workers | Literal["auto"] = "auto"
    cpus: Cpus | None = None
    worker_memory: Memory = 0
    worker_env: tuple[VariableName, ...] = ()
    keys: Path | None = None
    insecure: bool = False
    allow_factories: bool = False
    allow_arguments: tuple[Arguments, ...] = ()
    verbose_errors: bool = False
    gpus: tuple[Gpu, ...] = ()
    memory_max: Memory | None = None
    spares: Spares | None = None
    recycle: RecycleOptions = RecycleOptions()  # noqa: RUF009 - it is frozen

    sessions_max: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    max_envs: Envs = 4096
    envs_per_session_max: Envs = 1024
    spares_max: Spares = 8
    arena_bytes_max: SomeBytes = 2048 * MIB
    message_bytes_max: MessageBytes = 64 * MIB
    info_bytes_max: InfoBytes = MIB
    log: Path | None = None
    replays: Path | None = None
    replays_bytes_max: Bytes = 256 * MIB
    trace_bytes_max: Bytes = MIB
    snapshots_max: Annotated[int, Meta(ge=0, le=1 << 16)] = 256
    slow_ms: Annotated[int, Meta(ge=0, le=SLOW_MS_MAX)] = 1000

    web: WebAddress | None = None
    web_password_file: Path | None = None
    web_proxy: Origin = ""
    web_films: Path | None = None

    lease: Seconds = 60.0
    close_timeout_max: Seconds = 60.0
    drain_timeout: Seconds = 5.0
    drain_close_timeout: Seconds = 2.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


# --- reading them -----------------------------------------------------------------------------------------------------


class OptionError(ValueError):
    """An option is unknown, or its value is not allowed; one line that says where it stands, and what is allowed."""


@cache
def kinds_of(table: type) -> Mapping[str, Any]:
    return get_type_hints(table, include_extras=True)


def options_from(
    table: Mapping[str, Any],
    kind: type,
    where: str = "",
    folder: Path = Path(),
    key: Callable[[str], str] = str,
    hint: Callable[[str, Any], str] = lambda name, value: "",
    strict: bool = True,
) -> dict[str, Any]:
    """The options that a table has, as the fields of ``kind`` take them; raises ``OptionError``.

    In errors ``where`` stands before a name, ``key`` writes it, and ``hint`` may say more of an unknown one and its
    value than the nearest. Relative paths are in ``folder``. Unless it is ``strict``, numbers and truth values may be
    texts.
    """
    kinds, values = kinds_of(kind), {}
    for name, value in table.items():
        if name not in kinds:
            option = f"{where[:-1]}: " if where.endswith(".") else where
            raise OptionError(option + _unknown(name, kinds, hint(name, value)))
        option = f"{where}{key(name)}"
        read = _read(value, kinds[name], option, folder, key)
        try:
            values[name] = msgspec.convert(read, kinds[name], strict=strict, dec_hook=lambda kind, each: each)
        except msgspec.ValidationError as error:
            why, _, inner = str(error).partition(" - at `$")
            text = f"{option}{inner.rstrip('`')} = {value_text(value)}: {why[0].lower()}{why[1:]}"
            bounds = allowed(kinds[name])
            raise OptionError(f"{text}; allowed: {bounds}" if bounds else text) from None
    return values


def options_of_variables(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The options in these variables, and a warning of each name that nearly is an option's; raises ``OptionError``.

    An empty variable is as none. Bounds of a table have names such as ``recycle.episodes``.
    """
    names = {variable_of(name): name for name in _kinds_of_bounds()}
    values: dict[str, Any] = {}
    warnings = []
    for variable, text in environ.items():
        if not (variable.startswith(VARIABLES) and text) or variable[len(VARIABLES) :] in OTHER_VARIABLES:
            continue
        if name := names.get(variable, ""):
            table, key = _kinds_of_bounds()[name]
            value = _listed(text, kinds_of(table)[key])
            values[name] = options_from({key: value}, table, key={key: variable}.__getitem__, strict=False)[key]
        elif near := get_close_matches(variable, names, 1, NEAR):
            warnings.append(f"{variable} is no option; did you mean {near[0]}?")
    return values, warnings


def variable_of(name: str) -> str:
    return f"{VARIABLES}{name.upper().replace('.', '_')}"


@cache
def _kinds_of_bounds() -> Mapping[str, tuple[type, str]]:
    """By the name of each option, and of each bound of ``recycle``, its table and its key there."""
    bounds = {f"recycle.{key}": (RecycleOptions, key) for key in kinds_of(RecycleOptions)}
    return {**{name: (HubOptions, name) for name in kinds_of(HubOptions) if name != "recycle"}, **bounds}


def _listed(text: str, annotation: Any) -> Any:
    kind, _ = next(_kinds(annotation))
    if get_origin(kind) is not tuple:
        return text
    _, extra = next(_kinds(get_args(kind)[0]))
    return [each.strip() for each in re.split(extra.get("separator", ","), text)]


def _kinds(annotation: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """The kinds that an annotation allows, each with its bounds and reader."""
    extra: dict[str, Any] = {}
    while get_origin(annotation) is Annotated:
        annotation, *metas = get_args(annotation)
        for meta in metas:
            extra.update(meta.extra or {})
            if meta.ge is not None:
                extra["bounds"] = f"{meta.ge:.0f} to {meta.le:.0f}"
    if get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _kinds(each)
    else:
        yield annotation, {"read": read_path} if annotation is Path else extra


def _read(value: Any, annotation: Any, option: str, folder: Path, key: Callable[[str], str]) -> Any:
    for kind, extra in _kinds(annotation):
        arguments = get_args(kind)
        if isinstance(value, dict) and get_origin(kind) is dict:
            return {name: _read(each, arguments[1], f"{option}.{name}", folder, key) for name, each in value.items()}
        if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return kind(**options_from(value, kind, f"{option}.", folder, key))
        if isinstance(value, (list, tuple)) and get_origin(kind) is tuple:
            return [_read(each, arguments[0], f"{option}[{n}]", folder, key) for n, each in enumerate(value)]
        if "read" in extra and (kind is int or isinstance(value, str)):
            try:
                return extra["read"](value, folder)
            except ValueError as error:  # which has the text itself, unless it may have a key in it
                raise OptionError(f"{option}: {error}") from error
    return value


def check_distinct(name: str, values: Sequence[Any] | None) -> None:
    if values is not None and len({*values}) < len(values):
        raise OptionError(f"{name} = {value_text(values)}: the same is given twice")


def _unknown(name: str, kinds: Mapping[str, Any], hint: str) -> str:
    nearest = get_close_matches(name.casefold().replace("-", "_"), kinds, 1)
    question = f"; {RETIRED[name]}." if name in RETIRED else hint
    question = question or (f", did you mean {nearest[0]!r}?" if nearest else ".")
    return f"unknown key {name!r}{question} Keys here are: {', '.join(kinds)}"


def allowed(annotation: Any) -> str:
    texts = []
    for kind, extra in _kinds(annotation):
        if get_origin(kind) is Literal:
            texts += [f'"{word}"' for word in get_args(kind)]
        elif get_origin(kind) is tuple:
            texts.append(allowed(get_args(kind)[0]))
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            texts.append(f"a table of {', '.join(kind.__struct_fields__)}")
        elif kind is bool:
            texts.append("true or false")
        else:
            texts.append(extra.get("bounds", ""))
    return " or ".join(filter(None, texts))


def value_text(value: object) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:
        text = "a number with more digits than Python writes"
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[: VALUE_CHARS_MAX - 3]}..."


# --- the command line -------------------------------------------------------------------------------------------------


class Size(str):
    """Text of a number of bytes. A command line's help shows the name of the class for the value."""


def arguments_of(table: Any) -> Any:
    """A dataclass of a table's options for a command line; each is None unless given, and bytes are texts."""
    arguments = []
    for name, annotation in kinds_of(table).items():
        kinds = (*map(_argument, _kinds(annotation)), None)
        arguments.append((name, Union[kinds], field(default=None, metadata={"help": described(table, name)})))
    namespace = {"__module__": __name__}  # cyclopts takes a class of the module ``types`` for a builtin
    return make_dataclass(f"{table.__name__}Arguments", arguments, frozen=True, namespace=namespace)


def given(arguments: Any) -> dict[str, Any]:
    values = ((name, value) for name, value in vars(arguments).items() if value is not None)
    return {name: given(value) if is_dataclass(value) else value for name, value in values}


def _argument(kind_and_extra: tuple[Any, Mapping[str, Any]]) -> Any:
    kind, extra = kind_and_extra
    if get_origin(kind) is tuple:
        return List[_argument(next(_kinds(get_args(kind)[0])))]  # type: ignore[misc]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return arguments_of(kind)
    return Size if kind is int and "read" in extra else kind


def described(table: Any, name: str) -> str:
    text, default = descriptions(table).get(name, ""), default_text(table, name)
    return f"{text} {default} by default." if default else text


@cache
def descriptions(table: type) -> Mapping[str, str]:
    """The texts of the attributes in a docstring; none under ``python -OO``."""
    attributes = inspect.cleandoc(table.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def default_text(table: Any, name: str) -> str:
    """The default of a number; empty where the description says what happens without one."""
    default = getattr(table(), name)
    if isinstance(default, bool) or not isinstance(default, (int, float)) or not default:
        return ""
    if any("read" in extra for _, extra in _kinds(kinds_of(table)[name])):  # bytes
        power = next(power for power in (30, 20, 10, 0) if default % (1 << power) == 0)
        return f"{default / (1 << power):,.0f} {({30: 'Gi', 20: 'Mi', 10: 'Ki', 0: ''})[power]}B"
    return f"{default:,.10g}"


HubArguments: Any = arguments_of(HubOptions)
