"""The pages are whole: links lead somewhere, every page is found, and what they list is what the code has."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from envhub_client.session import maker
from envhub_client.session.options import FaultOptions, HostingOptions
from envhub_server import config, replay
from envhub_server.hub import hub_requests, replay_keeper, status
from envhub_server.hub.biography import SLOW_ROWS_MAX
from envhub_server.ipc import channel, control, process_marks, replay_file
from envhub_server.log import FIELD_CHARS_MAX, LINES_MAX
from envhub_server.memory import session_memory
from envhub_server.memory.session_memory import INFO_BYTES
from envhub_server.network import connections, key_folder, listener, proxy, proxy_page, zmtp_framing
from envhub_server.network.connections import RIGHTS, Quotas
from envhub_server.processes import worker_output
from envhub_server.session import launcher, snapshots, supervision
from envhub_server.worker import snapshot_row, trace_writer
from pages import MANUAL, PAGES, ROOT, blocks, section

from envhub import cli, errors, options
from envhub.arena import layout
from envhub.cli import commands
from envhub.env_failure import EnvFailure
from envhub.options import HubOptions
from envhub.protocol import messages, prelude, validation
from envhub.transport import sockets
from envhub.values import codec, leaf

SERVER = ROOT / "server/docs"
FOLDERS = ("envhub", "server", "client")
CODE = {path: path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
PARAGRAPH_LINES_MAX = 8
KEYWORDS = [each.name for options in (FaultOptions, HostingOptions, EnvFailure) for each in dataclasses.fields(options)]
# Where the blocks with a mark run; a block without one runs in ``tests/integration/test_readme.py``.
MARKS = {
    "python torch": "tests/frameworks/torch/test_framework_examples.py",
    "python rllib": "tests/frameworks/rllib/test_rllib.py",
    "python rllib-fleet": "tests/frameworks/rllib/test_rllib_fleets.py",
    "python old": "tests/integration/test_readme.py",
    "python slurm": "tests/integration/test_fleets.py",
    "python several": "tests/integration/test_many_hubs_sessions.py",
    "python ray": "tests/frameworks/rllib/test_ray_fleets.py",
    "python dm_env": "tests/integration/test_dm_and_pettingzoo.py",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor of each link of a page that leads to a file."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def table(page: Path, title: str) -> list[list[str]]:
    """The cells of the rows of a section's tables."""
    lines = [line for line in section(page, title).splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])] for line in lines]
    return [row for row, line in zip(rows, lines, strict=True) if not line.startswith("|---")][1:]


# --- links, and how a page reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for path, anchor in links(page):
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), f"{name_of(path)}#{anchor}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, left = {ROOT / "README.md"}, [ROOT / "README.md"]
    while left:
        found = {path for path, _ in links(left.pop()) if path.suffix == ".md"} - reached
        reached |= found
        left += found
    assert [name_of(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paragraphs_are_short(page: Path) -> None:
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|#]|\d+\. )", text_of(page)):
        assert len(paragraph.strip().splitlines()) <= PARAGRAPH_LINES_MAX, paragraph


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_program_is_run_by_a_test() -> None:
    marks = {mark for page in MANUAL for mark in re.findall(r"^```(python.*)$", page.read_text(), re.MULTILINE)}
    assert marks == {"python", *MARKS}
    for mark, test in MARKS.items():
        assert f'"{mark}"' in (ROOT / test).read_text()


def test_commands_are_understood() -> None:
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    given = [line.partition("#")[0] for line in lines if line.startswith("envhub ") and "[" not in line]
    assert len(given) >= 20
    for command in given:
        _, _, unknown = commands.app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)[:3]
        assert not unknown, command


def test_files_of_hubs_are_understood(tmp_path: Path) -> None:
    texts = blocks("toml", [page for page in MANUAL if page.name != "keys.md"])
    assert len(texts) >= 2
    for text in texts:
        (tmp_path / "hub.toml").write_text(text)
        assert config.read_hub_file(tmp_path / "hub.toml")[1]


def test_code_points_to_pages_that_exist() -> None:
    for path, text in CODE.items():
        for target in re.findall(r"[\w/.-]*\w\.md\b", text):
            assert [page for page in PAGES if f"/{page}".endswith(f"/{target}")], f"{path}: {target}"


def test_map_of_folders_is_whole() -> None:
    page = ROOT / "envhub/docs/architecture.md"
    (shown,) = (block for block in blocks("", [page]) if block.startswith("envhub/"))
    packages = {"envhub": "envhub", "server": "server/envhub_server", "client": "client/envhub_client"}
    for line in shown.splitlines():
        name = line.partition("/")[0]
        if name in packages:
            rooms = {path.parent.name for path in (ROOT / packages[name]).glob("*/__init__.py")}
            named = {*re.findall(r"(\w+)/(?=[,;\s]|$)", line.partition("/")[2])}
            assert named - {"docs", "examples"} == rooms, name
        assert (ROOT / name).is_dir()


# --- what the pages list ----------------------------------------------------------------------------------------------


def test_variables_are_those_that_the_code_reads() -> None:
    page = SERVER / "serve.md"
    shown = {
        row[0].strip("`") for title in ("Variables of programs", "Variables of a worker") for row in table(page, title)
    }
    named = {name for text in CODE.values() for name in re.findall(r"\bENVHUB_[A-Z_]*[A-Z]\b", text)}
    # Of an option the code may name the variable as an example; that of replays means more than the option.
    of_options = {options.variable_of(name) for name in options.kinds_of(HubOptions)} - {"ENVHUB_REPLAYS"}
    assert shown == named - of_options


def test_exit_statuses_are_those_of_the_command() -> None:
    rows = table(SERVER / "serve.md", "Exit statuses")
    assert {int(row[0]) for row in rows} == {0, cli.EXIT_FAILED, cli.EXIT_USAGE, cli.EXIT_KEYS}
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert named <= {*commands.app}


def test_errors_are_the_codes() -> None:
    shown = set()
    for names, bases, *_ in table(ROOT / "client/docs/api.md", "Errors"):
        for name in re.findall(r"`(\w+)`", names):
            shown.add(name)
            known = {base.__name__ for base in getattr(errors, name).__mro__}
            assert {each.rpartition(".")[2] for each in re.findall(r"`([\w.]+)`", bases)} <= known, name
    own = {
        name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, errors.EnvHubError)
    }
    assert shown == own - {"EnvHubError", "ProtocolError"}


def test_fields_of_a_failure_are_named() -> None:
    text = (ROOT / "client/docs/failures.md").read_text()
    assert all(f"`{field.name}`" in text for field in dataclasses.fields(EnvFailure))


def test_rights_and_quotas_are_the_codes() -> None:
    page = SERVER / "keys.md"
    assert [row[0].strip("`") for row in table(page, "Rights")] == [*RIGHTS]
    (quotas,) = blocks("toml", [page])
    shown = {name: int(number) for name, number in re.findall(r"^(\w+_max) = ([\d_]+)$", quotas, re.MULTILINE)}
    assert shown == msgspec.structs.asdict(Quotas())


def test_events_are_logged() -> None:
    nodes = (node for text in CODE.values() for node in ast.walk(ast.parse(text)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    tables = re.findall(r"^\|.*\|$", (SERVER / "troubleshooting.md").read_text(), re.MULTILINE)
    shown = {name for line in tables for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", line)}
    shown |= {*re.findall(r"`([a-z]+(?:_[a-z]+)+)`", section(SERVER / "monitoring.md", "The log"))}
    missing = shown - texts - {*KEYWORDS}
    assert not missing, missing


def test_counters_are_the_codes() -> None:
    text = section(SERVER / "monitoring.md", "Counters")
    counters = {name for row in table(SERVER / "monitoring.md", "Counters") for name in re.findall(r"`(\w+)`", row[0])}
    assert counters == keys_returned(hub_requests.HubRequests.counters)
    assert keys_returned(hub_requests.HubRequests.health) <= {*re.findall(r"`(\w+)`", text)}
    rows = {name for row in table(SERVER / "monitoring.md", "Sessions") for name in re.findall(r"`(\w+)`", row[0])}
    assert keys_returned(status.SessionTable._row) == rows


def keys_returned(function: Callable[..., object]) -> set[str]:
    """The keys of the dict that a function returns."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    (found,) = (node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    assert isinstance(found, ast.Dict)
    return {ast.literal_eval(key) for key in found.keys if key is not None}


LIMITS = {
    "leaves of an observation or an action space": leaf.LEAVES_MAX,
    "a time that a client sets": validation.SECONDS_MAX,
    "`restarts_max` that a client sets": validation.RESTARTS_MAX,
    "workers and spares of a session that its operator says": options.PROCESSES_MAX,
    "bytes of memory that the operator says, unless 0, at least": options.BYTES_MIN,
    "bytes of memory that the operator says, at most": options.BYTES_MAX,
    "processes of a worker whose memory counts for `memory_max`": process_marks.PROCESSES_MAX,
    "values of attributes of a session, which are set again on new envs": control.BYTES_MAX,
    "memory of snapshots that these share with no other process, and requests, of a session": snapshots.NBYTES_MAX,
    "living snapshots that the process of a snapshot descends from": snapshots.DEPTH_MAX,
    "requests of an env since a snapshot": snapshot_row.REQUESTS_MAX,
    "snapshots of envs of a session": snapshots.LISTED_MAX,
    "age of a snapshot": snapshots.AGE_MAX_S,
    "one frame from the hub": prelude.FRAME_BYTES_MAX,
    "frames of a message": prelude.FRAMES_MAX,
    "header of a request, besides the bytes that the hub passes on unread": codec.HEADER_BYTES_MAX,
    "items in a header": codec.HEADER_ITEMS_MAX,
    "lists and maps around an item": codec.HEADER_DEPTH_MAX,
    "a worker's message, such as a result that is too large for the arena": channel.WORKER_MESSAGE_BYTES_MAX,
    "items of a worker's message, such as names of envs": channel.WORKER_LIMITS.items_max,
    "SENDs and RECEIVEs of a session without a reply": prelude.WINDOW,
    "replies of a session that has ended and that its client does not read": session_memory.UNREAD_S,
    "an info or a result of a call in the arena": INFO_BYTES,
    "a reset or a call in the arena": layout.MESSAGE_BYTES,
    "a worker's output that is kept": worker_output.TAIL_BYTES,
    "a worker's output in the report of its end": supervision.LOG_TAIL_CHARS_MAX,
    "files in the folder of replays": replay.FILES_MAX,
    "replays that wait to be written": replay_keeper.WAITING_MAX,
    "the trace of an env, or of a vector env, in a replay": replay_file.TAKEN_BYTES_MAX,
    "time for replays to be written when the hub ends": replay_keeper.CLOSE_S,
    "a program that ends, to wait for the ends of the sessions that it leaves open": maker.EXIT_S,
    "connections that wait to be accepted, by ipc": listener.IPC_BACKLOG,
    "connections that wait to be accepted, by tcp without the proxy": listener.TCP_BACKLOG,
    "connections that wait to be accepted, by the proxy": listener.PROXIED_BACKLOG,
    "connections of the proxy, of which each has two descriptors": proxy_page.SLOTS,
    "the handshake of a new connection": sockets.HANDSHAKE_MS / 1000,
    "the first message of a new connection": connections.HELLO_S,
    "messages of a connection that cannot be read, until it is ended": connections.MALFORMED_MAX,
    "unread frames of a connection that the proxy passes on": proxy.FRAMES_SHARE * prelude.FRAMES_MAX,
    "bytes of a message that has begun, by the proxy, within 10 s, at least": connections.PROGRESS_BYTES,
    "bytes that a client sends by the proxy before it is admitted": zmtp_framing.HANDSHAKE_BYTES_MAX,
    "clients with keys": key_folder.CLIENTS_MAX,
    "keys of a client": key_folder.KEYS_PER_CLIENT_MAX,
    "lines of one event in 10 s, of one client and place": LINES_MAX,
    "a text in a line": FIELD_CHARS_MAX,
    "slow steps, resets and calls in that list": SLOW_ROWS_MAX,
}
UNNAMED = {"equal lines of one event in 10 s"}  # of the code, which has no name for it alone
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "PiB": 1 << 50, "days": 24 * 3600}


def limits(*titles: str) -> Iterator[tuple[str, float, str]]:
    """The name, the default, and what changes it, of each limit in the tables of these sections."""
    for title in titles:
        for name, text in table(SERVER / "limits.md", title):
            default, _, changed_by = text.partition(" (")
            number, _, unit = default.partition(" ")
            size = float(number.replace(",", "")) * UNITS.get(unit, 1)
            yield re.split(r" \(|;", name)[0], size, changed_by.rstrip(")")


SECTIONS = (*("Sessions", "Messages", "Infos and output", "Replays", "Connections", "Log"), "The end of a hub")


def test_limits_are_the_codes() -> None:
    shown = {name: number for name, number, changed_by in limits(*SECTIONS) if not changed_by}
    assert shown.keys() == LIMITS.keys() | UNNAMED
    assert {name: shown[name] for name in LIMITS} == {name: float(limit) for name, limit in LIMITS.items()}


def test_deadlines_of_clients_are_the_protocols() -> None:
    assert FaultOptions().wire() == messages.Faults()


def test_limits_that_options_change_have_their_defaults_and_every_option_with_a_limit_is_shown() -> None:
    names = {f"--{name.replace('_', '-')}": name for name in options.kinds_of(HubOptions)}
    shown = set()
    for name, number, changed_by in limits(*SECTIONS):
        if changed_by:
            times, option = re.fullmatch(r"(twice |[\d.]+ times )?`(--[a-z-]+)`", changed_by).groups()  # type: ignore[union-attr]
            factor = {None: 1.0, "twice ": 2.0}.get(times) or float(times.split()[0])
            assert number == factor * getattr(HubOptions(), names[option]), name
            shown.add(option)
    assert shown == {option for option, name in names.items() if options.default_text(HubOptions, name)}


def test_numbers_in_the_texts_are_the_codes() -> None:
    text = " ".join((SERVER / "limits.md").read_text().split())
    for sentence in (
        f"it grows up to {layout.LARGE_INFO_BYTES_MAX >> 20} MiB",
        f"it grows up to {layout.LARGE_MESSAGE_BYTES_MAX >> 20} MiB",
        f"started again after {launcher.DELAY_S} s",
        f"up to {launcher.DELAY_MAX_S:.0f} s",
        f"{launcher.JITTER:.0%} longer or shorter".replace("%", " %"),
        f"Within {launcher.WINDOW_S:.0f} s one worker may end {messages.Faults().restarts_max} times",
        f"all workers together {launcher.ALL_MAX} times",
    ):
        assert sentence in text, sentence
    replays = (ROOT / "client/docs/replays.md").read_text()
    assert f"{trace_writer.UNSEEDED_BATCHES:,} steps" in replays and f"{replay.FILES_MAX:,} files" in replays
    assert f"`--trace-bytes-max` ({HubOptions().trace_bytes_max >> 20} MiB per env)" in replays


def test_functions_of_the_page_are_in_the_file_that_it_names() -> None:
    text = (ROOT / "tests/frameworks/simulators/factories.py").read_text()
    functions = {each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)}
    lines = re.findall(r"^- [\w-]+: `([^`]+)`", (ROOT / "server/docs/simulators.md").read_text(), re.MULTILINE)
    assert len(lines) > 40
    assert {env for env in lines if ":" not in env} <= functions
