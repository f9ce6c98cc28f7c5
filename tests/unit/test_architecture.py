"""The invariants of the architecture, read off the source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "envhub": ROOT / "envhub",
    "envhub_server": ROOT / "server/envhub_server",
    "envhub_client": ROOT / "client/envhub_client",
}
FILES = {str(path.relative_to(ROOT)): path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))}

PURE = [
    "envhub/values/actions.py",
    "envhub/values/codec.py",
    "envhub/arena/layout.py",
    "envhub/protocol/messages.py",
    "envhub/protocol/prelude.py",
    "envhub/protocol/hub.py",
    "envhub/protocol/client.py",
    "envhub/values/spaces.py",
    "envhub/protocol/validation.py",
    "server/envhub_server/catalog/registry.py",
    "server/envhub_server/hub/planner.py",
    *(each for each in FILES if each.startswith("server/envhub_server/session/")),
]
STEP_PATH = [
    "envhub/transport/sockets.py",
    "client/envhub_client/connection/zeromq_transport.py",
    "server/envhub_server/hub/hub.py",
    "server/envhub_server/hub/gateway.py",
]
SOCKETS = [*STEP_PATH, "server/envhub_server/network/listener.py", "server/envhub_server/network/access.py"]

Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, str, bool]]:
    """Module, imported name (empty for a whole module) and whether it stands inside a function, of every import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from ((node.module or "", alias.name, inside) for alias in node.names)
        else:
            yield from imports(node, inside or isinstance(node, Function))


@cache  # and not when this is imported, which every process of a run of the tests does
def nodes_of(name: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(FILES[name].read_text(), name)))


@cache
def imports_of(name: str) -> list[tuple[str, str, bool]]:
    return list(imports(nodes_of(name)[0]))


@cache
def calls_of(name: str) -> list[ast.Call]:
    return [node for node in nodes_of(name) if isinstance(node, ast.Call)]


def of_each(names: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make one test of a check of each file; there are too many files for a test each."""

    def decorate(check: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            failures = []
            for name in names:
                try:
                    check(name)
                except AssertionError as error:
                    failures.append(f"{name}: {error}")
            assert not failures, "\n".join(failures)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def packages_imported(name: str, at_module_level: bool = False) -> set[str]:
    return {module.partition(".")[0] for module, _, inside in imports_of(name) if not (at_module_level and inside)}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` as text, or an empty string for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_files_are_found() -> None:
    assert {*PURE, *STEP_PATH, "server/envhub_server/worker/process.py", "envhub/cli/serve.py"} <= FILES.keys()


# --- who imports whom -------------------------------------------------------------------------------------------------

# Which rooms of its package each room imports, and each file at the top level that imports any; for the client also
# which of ``envhub``. Every room may import the top level.
ROOMS = {
    "envhub": {
        "arena": {"transport", "values"},
        "cli": {"fleet", "transport"},
        "fleet": {"transport"},
        "protocol": {"arena", "values"},
        "transport": set(),
        "values": set(),
        "__main__.py": {"cli"},
        "action_chunk.py": {"values"},
        "env_failure.py": {"values"},
        "options.py": {"protocol", "transport"},
    },
    "envhub_server": {
        "catalog": {"ipc", "processes"},
        "hub": {"catalog", "ipc", "memory", "network", "processes", "session"},
        "ipc": set(),
        "memory": {"ipc", "session"},
        "network": {"ipc", "processes"},
        "processes": {"ipc"},
        "session": {"catalog", "ipc", "processes"},
        "web": {"ipc", "processes"},
        "worker": {"ipc"},
        "config.py": {"catalog", "processes"},
        "doctor.py": {"network", "processes"},
        "private_hub.py": {"hub", "ipc", "network", "processes"},
        "replay.py": {"ipc", "processes"},
        "serve.py": {"catalog", "hub", "ipc", "processes", "web"},
        "validate.py": {"catalog", "ipc", "network", "processes", "session"},
    },
    "envhub_client": {
        "connection": {"envhub.fleet", "envhub.protocol", "envhub.transport", "envhub.values"},
        "envs": {"envhub.protocol", "envhub.values", "lanes", "session"},
        "federation": {
            *("connection", "lanes", "session"),
            *("envhub.arena", "envhub.protocol", "envhub.transport", "envhub.values"),
        },
        "frameworks": {"connection", "envhub.transport", "envhub.values", "envs"},
        "lanes": {"connection", "envhub.arena", "envhub.protocol", "envhub.transport", "envhub.values"},
        "private_hub": {"connection", "envhub.protocol", "envhub.transport", "envhub.values"},
        "recording": {"envhub.protocol", "envhub.transport", "envhub.values", "envs"},
        "session": {
            *("connection", "lanes", "private_hub"),
            *("envhub.arena", "envhub.protocol", "envhub.transport", "envhub.values"),
        },
        "tools": {"connection", "envhub.transport"},
        "client.py": {"connection", "envs", "session", "envhub.protocol", "envhub.transport"},
        "make.py": {
            *("connection", "envs", "federation", "recording", "session"),
            *("envhub.protocol", "envhub.transport", "envhub.values"),
        },
        "observer.py": {"connection", "envs", "lanes", "envhub.protocol", "envhub.values"},
        "option_keywords.py": {"session"},
    },
}


def room(place: list[str]) -> str:
    """The room of a module or package, given by its dotted parts; empty for the top level."""
    return place[1] if len(place) > 1 and place[1] in ROOMS[place[0]] else ""


def package_of(name: str) -> str:
    return next(package for package, folder in PACKAGES.items() if FILES[name].is_relative_to(folder))


def key_of(name: str) -> str:
    """The key of a file in the table of its package: its room, or its own name at the top level."""
    return FILES[name].relative_to(PACKAGES[package_of(name)]).parts[0]


def rooms_imported(name: str) -> set[str]:
    """The other rooms that a file imports, as the table names them."""
    package, found = package_of(name), set()
    for module, imported, _ in imports_of(name):
        place = [*module.split("."), imported]
        if place[0] == package and room(place) != key_of(name):
            found.add(room(place))
        if (place[0], package) == ("envhub", "envhub_client") and room(place):
            found.add(f"envhub.{room(place)}")
    return found - {""}


def test_rooms_and_top_level_files_import_the_rooms_in_the_table() -> None:
    found: dict[str, dict[str, set[str]]] = {
        package: {room: set() for room in rooms} for package, rooms in ROOMS.items()
    }
    for name in FILES:
        if rooms := rooms_imported(name):
            found[package_of(name)].setdefault(key_of(name), set()).update(rooms)
    assert found == ROOMS


def test_no_two_rooms_import_each_other() -> None:
    for rooms in ROOMS.values():
        behind = {name: found & rooms.keys() for name, found in rooms.items()}
        while behind:
            leaves = {name for name, found in behind.items() if not found & behind.keys()}
            assert leaves, f"a circle among {sorted(behind)}"
            behind = {name: found for name, found in behind.items() if name not in leaves}


def modules() -> dict[str, str]:
    """The file of each module, by the module's dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = str(path.relative_to(ROOT))
    return found


def test_no_modules_import_each_other() -> None:
    """Neither when they run nor for annotations alone, under ``TYPE_CHECKING``."""
    files = modules()
    behind = {
        module: {
            f"{source}.{name}" if f"{source}.{name}" in files else source
            for source, name, _ in imports_of(files[module])
        }
        for module in files
    }
    while behind:
        leaves = {module for module, found in behind.items() if not found & behind.keys()}
        assert leaves, f"a circle among {sorted(behind)}"
        behind = {module: found for module, found in behind.items() if module not in leaves}


def test_every_folder_is_a_room() -> None:
    for package, folder in PACKAGES.items():
        rooms = {name for name in ROOMS[package] if not name.endswith(".py")}
        assert {path.parent.name for path in folder.glob("*/__init__.py")} == rooms


@of_each(FILES)
def test_server_and_client_never_import_each_other(name: str) -> None:
    other = {"server": "envhub_client", "client": "envhub_server"}.get(name.partition("/")[0])
    assert other not in packages_imported(name)


# ``envhub.sb3`` and the like, which nothing else imports.
ENTRY_POINTS = {f"envhub/{Path(name).name}" for name in FILES if "/frameworks/" in name and "__" not in name}


def test_nothing_imports_an_entry_point_of_a_framework() -> None:
    modules = {name.removesuffix(".py").replace("/", ".") for name in ENTRY_POINTS}
    for name in FILES:
        found = {module for module, _, _ in imports_of(name)}
        assert not modules & found, name


@of_each([name for name in FILES if name.startswith("envhub/") and name not in ENTRY_POINTS])
def test_shared_code_imports_a_side_only_inside_functions(name: str) -> None:
    assert not {"envhub_server", "envhub_client"} & packages_imported(name, at_module_level=True)


@of_each(FILES)
def test_zmq_is_imported_by_the_owners_of_sockets_only(name: str) -> None:
    if name not in SOCKETS:
        assert "zmq" not in packages_imported(name)


@of_each(FILES)
def test_multiprocessing_gives_only_its_timeout_error_and_the_names_of_start_methods(name: str) -> None:
    found = {(module, what) for module, what, _ in imports_of(name) if module.startswith("multiprocessing")}
    assert found <= {("multiprocessing", "TimeoutError"), ("multiprocessing", "get_all_start_methods")}


@of_each(FILES)
def test_only_the_zygote_forks_without_exec(name: str) -> None:
    calls = {dotted(call.func) for call in calls_of(name)}
    if name == "server/envhub_server/worker/zygote.py":
        calls.remove("os.fork")
    assert not {"os.fork", "os.forkpty", "pty.fork", "asyncio.run"} & calls
    keywords = {word.arg for call in calls_of(name) for word in call.keywords}
    assert "preexec_fn" not in keywords


# --- budgets ----------------------------------------------------------------------------------------------------------

# Lines and modules that a folder may have, itself alone; raising one is a line here with a reason.
BUDGETS = {
    "client/envhub_client": (1215, 9),  # slow(); drain(wait); acts of operators; frames as PNG; snapshots
    "client/envhub_client/connection": (1668, 7),  # waits for the window; snapshots; has files of sockets, by itself
    "client/envhub_client/envs": (1923, 8),  # a missing result of a call is a breach; snapshots
    "client/envhub_client/federation": (2064, 8),  # snapshots
    "client/envhub_client/frameworks": (1378, 8),  # snapshots; 18 say what is left of retired names
    "client/envhub_client/lanes": (1097, 5),  # times steps; posts resets and calls in shared memory, past the hub
    "client/envhub_client/private_hub": (328, 3),
    "client/envhub_client/recording": (1046, 4),  # snapshots
    "client/envhub_client/session": (1357, 7),  # sessions that a program leaves open at its end; snapshots
    "client/envhub_client/tools": (931, 6),  # columns of sessions and slow requests; `envhub top`, printed and live
    # minari.py says what is left of it; action_chunk.py; diagnosis.py finds trouble; log file; variables of options
    "envhub": (1708, 18),  # snapshots
    "envhub/arena": (746, 4),  # times of steps; large infos of numbers; one row alone is observed
    "envhub/cli": (
        1251,
        7,
    ),  # ls waits for no absent socket; service; --show-config; operate; drain --wait; top; --check, doctor, validate
    "envhub/fleet": (640, 3),
    "envhub/protocol": (1534, 6),  # STATUS and OPERATE; several SENDs under way; snapshots; fewer calls
    "envhub/transport": (700, 5),  # an address says whether its bytes cost
    "envhub/values": (2105, 9),  # numbers by fewer calls; columns of up to 1 MiB, by an example without their values
    # what systemd is told, and its unit; origins of settings, and their reload; doctor and validate
    "server/envhub_server": (1902, 10),
    "server/envhub_server/catalog": (563, 3),
    "server/envhub_server/hub": (3606, 12),  # slow requests; table of sessions; actions on workers; snapshots
    "server/envhub_server/ipc": (1197, 7),  # slow requests; frames; trials of envs; snapshots
    "server/envhub_server/memory": (709, 3),  # times steps; completes calls and resets of workers that end
    "server/envhub_server/network": (2250, 10),  # who acts; restarts by order
    "server/envhub_server/processes": (1496, 6),  # reads stacks of workers that run; snapshots
    "server/envhub_server/session": (3262, 12),  # SENDs that wait; ordered restarts; snapshots
    # times steps; draws for operators; tries envs, all that validate says; snapshots; verbs by fewer calls
    "server/envhub_server/worker": (5616, 23),
    "server/envhub_server/web": (1220, 7),  # looks for leaks; who may see it, who guesses; metrics; tables, curves
}


@of_each(BUDGETS)
def test_folder_keeps_to_its_budget(folder: str) -> None:
    modules = [*(ROOT / folder).glob("*.py")]
    lines, (lines_max, modules_max) = sum(len(path.read_text().splitlines()) for path in modules), BUDGETS[folder]
    assert lines <= lines_max and len(modules) <= modules_max, f"{lines} lines in {len(modules)} modules"


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_class_has_a_name_of_its_own() -> None:
    places = [(node.name, name) for name in FILES for node in nodes_of(name) if isinstance(node, ast.ClassDef)]
    names = Counter(name for name, _ in places)
    assert not sorted(place for place in places if names[place[0]] > 1)


@of_each(name for name in FILES if not name.startswith("server/envhub_server/session/"))
def test_phase_of_a_session_is_set_by_its_machine_alone(name: str) -> None:
    set_to = [node for node in nodes_of(name) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    assert not [node for node in set_to if node.attr == "phase" and dotted(node.value).endswith("state")]


# --- purity -----------------------------------------------------------------------------------------------------------


@of_each(PURE)
def test_pure_modules_know_no_clock_no_chance_and_no_outside(name: str) -> None:
    impure = {
        "time",
        "datetime",
        "random",
        "secrets",
        "os",
        "socket",
        "select",
        "subprocess",
        "threading",
        "asyncio",
        "zmq",
    }
    assert not impure & packages_imported(name)


@of_each([name for name in PURE if "protocol" in name or "messages" in name])
def test_protocol_knows_no_gymnasium(name: str) -> None:
    assert "gymnasium" not in packages_imported(name)


def test_no_module_reads_the_wall_clock() -> None:
    for name in FILES:
        calls = {dotted(call.func) for call in calls_of(name)}
        assert not {"time.time", "datetime.now", "datetime.datetime.now"} & calls, name


# --- pickle -----------------------------------------------------------------------------------------------------------

UNPICKLERS = {f"{module}.{name}" for module in ("pickle", "cloudpickle") for name in ("load", "loads", "Unpickler")}
DANGERS = {"recv_pyobj", "recv_serialized", "patch", "eval", "exec"}


def unpicklings(name: str) -> list[ast.AST]:
    """Every mention of a function that unpickles, called or not."""
    return [node for node in nodes_of(name) if dotted(node) in UNPICKLERS]


@of_each(FILES)
def test_only_workers_and_the_codecs_one_exception_unpickle(name: str) -> None:
    if name not in ("envhub/values/codec.py", "server/envhub_server/worker/env_sources.py"):
        assert unpicklings(name) == []


@of_each(FILES)
def test_pickle_is_always_called_by_its_full_name(name: str) -> None:
    # Otherwise the test above would not see it.
    found = [(module, what) for module, what, _ in imports_of(name) if "pickle" in module and what]
    assert found == []
    aliases = [alias for node in nodes_of(name) if isinstance(node, ast.Import) for alias in node.names]
    assert not [alias.name for alias in aliases if "pickle" in alias.name and alias.asname]


def test_codec_unpickles_only_where_the_caller_allows_it() -> None:
    (unpickling,) = unpicklings("envhub/values/codec.py")
    guards = [
        ast.unparse(node.test)
        for node in nodes_of("envhub/values/codec.py")
        if isinstance(node, ast.If) and any(inner is unpickling for line in node.body for inner in ast.walk(line))
    ]
    assert guards == ["code == PICKLE and self._allow_pickle"]


@of_each(FILES)
def test_no_other_way_to_run_what_came_over_a_socket(name: str) -> None:
    for call in calls_of(name):
        called = dotted(call.func)
        assert called.rpartition(".")[2] not in DANGERS, called
        assert not called.startswith(("marshal.", "shelve.", "dill.", "joblib.")), called
        assert "allow_pickle" not in {word.arg for word in call.keywords} or not called.startswith("np."), called


# --- secrets ----------------------------------------------------------------------------------------------------------

# Who takes a key out of its ``Secret``, and how often: to write its file, to give it to a socket, to read an address,
# to print it once.
REVEALING = {
    "envhub/cli/keys.py": 1,
    "envhub/fleet/hub_actor.py": 1,
    "envhub/transport/address.py": 4,
    "envhub/transport/sockets.py": 3,
    "client/envhub_client/connection/known_hubs.py": 2,
}


def test_secrets_are_revealed_where_the_table_says_and_nowhere_else() -> None:
    others = {name: path.read_text() for name, path in FILES.items() if name != "envhub/secret.py"}
    assert {name: text.count("reveal_secret") for name, text in others.items() if "reveal_secret" in text} == REVEALING
    assert not [name for name, text in others.items() if re.search(r"\b_hidden\b", text)]


# --- dependencies -----------------------------------------------------------------------------------------------------

MODULE_OF = {"pyzmq": "zmq", "msgpack-numpy": "msgpack_numpy", "typing-extensions": "typing_extensions"}


def test_every_dependency_is_imported() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split("[><=]", line)[0] for line in project["dependencies"]]
    used = {package for name in FILES for package in packages_imported(name)}
    assert {MODULE_OF.get(name, name) for name in names} <= used


@of_each(FILES)
def test_no_module_imports_what_only_the_tests_need(name: str) -> None:
    assert not {"matplotlib", "psutil"} & packages_imported(name)


# --- Python 3.8 -------------------------------------------------------------------------------------------------------

BUILTINS_WITHOUT_ITEMS = {"dict", "frozenset", "list", "set", "tuple", "type"}


def old_python_files() -> list[str]:
    """The files that a worker may import under Python 3.8, as pyproject.toml says to ruff."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["per-file-target-version"]
    return [name for name in FILES if any(Path(name).match(pattern) for pattern in targets)]


def test_files_for_python_3_8_evaluate_no_generics_that_it_lacks() -> None:
    for name in old_python_files():
        lacking = BUILTINS_WITHOUT_ITEMS | {what for module, what, _ in imports_of(name) if module == "collections.abc"}
        slots = [getattr(node, slot, None) for node in nodes_of(name) for slot in ("annotation", "returns")]
        annotations = {inner for slot in slots if isinstance(slot, ast.AST) for inner in ast.walk(slot)}
        evaluated = [node for node in nodes_of(name) if isinstance(node, ast.Subscript) and node not in annotations]
        assert not [ast.unparse(node) for node in evaluated if dotted(node.value) in lacking], name
