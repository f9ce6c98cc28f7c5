"""The page's own logic: curves of the last hour, admission, and metrics made of rows of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("nicegui")
prometheus_client = pytest.importorskip("prometheus_client")

from envhub_server.web import contents, gate, metrics, page, process  # noqa: E402
from envhub_server.web.contents import HUB, KEPT_S, SAMPLE_S, SERIES_MAX, History  # noqa: E402
from envhub_server.web.gate import ADMIN, FAILURES_MAX, VIEWER, Gate, WebAccess  # noqa: E402
from envhub_server.web.metrics import OTHER, PAIRS_MAX, HubCollector, Look  # noqa: E402
from envhub_server.web.tables import session_row, worker_rows  # noqa: E402
from prometheus_client import parser  # noqa: E402
from test_pages import limits  # noqa: E402

from envhub.errors import HubLost  # noqa: E402

MIB = 1 << 20


def row(session: str = "0a", env: str = "Cart-v1", key: str = "alice", **fields: Any) -> dict[str, Any]:
    process = {
        "worker": 0,
        "pid": 7,
        "envs": [0, 1],
        "doing": "step",
        "env": 1,
        "since_s": 3.0,
        "cpu_s": 1.0,
        "cpu": 0.5,
    }
    process |= {"memory_bytes": 10 * MIB, "restarts": 0, "env_ms": {"p50": 1.0, "p99": 2.0}}
    made = {"session": session, "env": env, "owner": {"key": key, "user": "", "host": "", "pid": 1, "program": ""}}
    made |= {"label": "", "kwargs": "", "num_envs": 2, "age_s": 10.0, "idle_s": 0.0, "phase": "ready", "lane": "wire"}
    made |= {"leased": False, "steps": 100, "steps_per_s": 50.0, "step_ms": {"p50": 1.5, "p99": 4.0}}
    made |= {"env_ms": {"p50": 1.0, "p99": 2.0}, "cpu_s": 1.0, "cpu": 0.5, "memory_bytes": 10 * MIB, "workers": [7]}
    made |= {"processes": [process], "restarts": 0, "reasons": [], "recycled": 0, "replays": [], "sizing": ""}
    return {**made, **fields}


def ended(by: str, **fields: Any) -> dict[str, Any]:
    kept = {name: value for name, value in row(**fields).items() if name not in ("processes", "workers")}
    return {**kept, "ended_s": 1.0, "by": by, "why": "it was asked to", "how": "closed"}


# --- curves -----------------------------------------------------------------------------------------------------------


def test_curves_sum_rates_and_have_the_times_of_the_slowest_session() -> None:
    history = History()
    history.add(0.0, [row(), row("0b", step_ms={"p50": 3.0, "p99": 9.0}, steps_per_s=None)])
    history.add(60.0, [])
    curves = history.curves(60.0)
    assert curves["steps_per_s"] == [[-1.0, 50.0], [0.0, 0.0]]
    assert curves["p99_ms"] == [[-1.0, 9.0], [0.0, None]]
    assert history.curves(60.0, "0b")["steps_per_s"] == [[-1.0, None]]
    assert history.curves(60.0, "0c")["cpu"] == []


def test_history_keeps_an_hour_and_forgets_sessions_that_were_sampled_longest_ago() -> None:
    history = History()
    for n in range(int(KEPT_S / SAMPLE_S) + 100):
        history.add(n * SAMPLE_S, [row(f"{n:02x}"), row("kept")])
    end_s = (n + 1) * SAMPLE_S
    assert len(history.curves(end_s)["cpu"]) == len(history.curves(end_s, "kept")["cpu"]) == KEPT_S / SAMPLE_S
    assert len(history._series) == SERIES_MAX + 1 and HUB in history._series
    assert history.curves(end_s, "00")["cpu"] == []


# --- admission --------------------------------------------------------------------------------------------------------


def admission(**fields: Any) -> WebAccess:
    return WebAccess(
        **{"passwords": [("secret-of-admins", ADMIN), ("of-viewers", VIEWER)], "key": "k", "port": 1, **fields}
    )


def test_password_and_cookie_give_their_role_and_a_forged_one_none() -> None:
    own = admission()
    assert [*map(own.role_of_password, ("secret-of-admins", "of-viewers", "other", "", "\u00e9"))] == [
        ADMIN,
        VIEWER,
        "",
        "",
        "",
    ]
    assert own.role({"authorization": "Bearer of-viewers"}, {}) == VIEWER
    assert own.role({}, {"envhub-1": own.cookie(ADMIN)}) == ADMIN
    forged = (own.cookie(VIEWER).replace(VIEWER, ADMIN), admission(key="other").cookie(ADMIN), "", "admin.")
    assert [own.role({}, {"envhub-1": each}) for each in forged] == [""] * len(forged)
    assert own.role({}, {"envhub-2": own.cookie(ADMIN)}) == ""  # of a hub at another port
    assert admission(passwords=[], proxy="https://lab.example").role({}, {}) == ADMIN


@pytest.mark.parametrize(
    ("host", "fields", "is_own"),
    [
        ("127.0.0.1:8265", {}, True),
        ("localhost:8265", {}, True),
        ("[::1]:8265", {}, True),
        ("evil.example:8265", {}, False),
        ("127.0.0.1.evil.example", {}, False),
        ("", {}, False),
        ("[", {}, False),
        ("simbox:8265", {"loopback": False}, True),
        ("simbox:8265", {"loopback": False, "passwords": [], "proxy": "https://lab.example"}, False),
        ("lab.example", {"passwords": [], "proxy": "https://lab.example"}, True),
    ],
)
def test_page_of_a_loopback_address_is_at_no_name_of_another_site(host: str, fields: Any, is_own: bool) -> None:
    assert (admission(**fields).foreign({"host": host}) == "") == is_own


@pytest.mark.parametrize(
    ("origin", "proxy", "is_own"),
    [
        ("http://127.0.0.1:8265", "", True),
        ("http://127.0.0.1:9999", "", False),
        ("https://evil.example", "", False),
        ("null", "", False),
        ("http://[", "", False),
        ("https://lab.example", "https://lab.example", True),
    ],
)
def test_request_of_another_origin_is_foreign(origin: str, proxy: str, is_own: bool) -> None:
    headers = {"host": "127.0.0.1:8265", "origin": origin}
    assert (admission(proxy=proxy).foreign(headers) == "") == is_own


async def shown(scope: Any, receive: Any, send: Any) -> None:
    """The application behind a gate."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def status(gate: Gate, client: str, password: str) -> int:
    """How the gate answers a program on the machine ``client``."""
    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {password}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/metrics", "query_string": b"", "headers": headers}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await gate({**scope, "client": (client, 1)}, send, send)
    return int(sent[0]["status"])


def test_who_guesses_passwords_waits_and_holds_up_nobody_else() -> None:
    async def run() -> None:
        gate = Gate(shown, admission())
        guesses = [asyncio.create_task(status(gate, "guesser", "wrong")) for _ in range(FAILURES_MAX)]
        await asyncio.sleep(0)
        assert not any(each.done() for each in guesses)
        # Neither does it learn meanwhile which one is right.
        assert await status(gate, "guesser", "of-viewers") == await status(gate, "guesser", "other") == 429
        assert await status(gate, "other", "of-viewers") == 200
        assert await asyncio.gather(*guesses) == [401] * FAILURES_MAX
        assert await status(gate, "guesser", "of-viewers") == 200

    asyncio.run(run())


# --- metrics ----------------------------------------------------------------------------------------------------------


class Looks:
    """Answers of a hub, one after another."""

    def __init__(self, *looks: tuple[list[Any], list[Any]]) -> None:
        self.left: Iterator[Any] = iter(looks)

    def __call__(self) -> Look:
        sessions, ends = next(self.left)
        stats = {
            "status": "ok",
            "uptime_s": 1.0,
            "sessions": 1,
            "loop_lag_s": 0.0,
            "unready": {"Sim-v0": "why"},
            "requests": 3,
            "failures": {"limit": 2},
            "capacity": {"cpus": 2, "cpus_free": 1.0},
            "arena_bytes": 4096,
        }
        return Look(stats, sessions, ends)


def scrapes(*looks: tuple[list[Any], list[Any]]) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    HubCollector(Looks(*looks), "box", registry)
    return registry


def scraped(registry: prometheus_client.CollectorRegistry) -> dict[tuple[str, ...], float]:
    """The values of one scrape, by the name and the values of the labels."""
    text = prometheus_client.generate_latest(registry).decode()
    families = [*parser.text_string_to_metric_families(text)]
    assert all(family.documentation for family in families)
    samples = [each for family in families for each in family.samples]
    names = ("env", "client", "by", "code")
    return {(s.name, *(s.labels[name] for name in names if name in s.labels)): s.value for s in samples}


def test_counters_go_on_when_their_session_ends_and_begin_with_the_first_look() -> None:
    first, second = row(steps=100, restarts=1), row(steps=130, restarts=2)
    registry = scrapes(
        ([first], [ended("client", session="00", steps=5000)]),
        ([second], []),
        # The first one ends after the hub was asked for its sessions, and before it is asked for those that ended.
        ([row(steps=140, restarts=2), row("0b", steps=7)], [ended("admin bob", steps=150, restarts=2)]),
        ([], [ended("lease", session="0b", steps=9), ended("admin bob", steps=150, restarts=2)]),
    )
    seen = [scraped(registry) for _ in range(4)]
    own = "Cart-v1", "alice"
    assert [each.get(("envhub_steps_total", *own)) for each in seen] == [None, 30, 57, 59]
    assert [each.get(("envhub_restarts_total", *own)) for each in seen] == [None, 1, 1, 1]
    assert [each.get(("envhub_sessions_made_total", *own)) for each in seen] == [None, 0, 1, 1]
    assert seen[3][("envhub_sessions_ended_total", *own, "admin")] == 1
    assert seen[3][("envhub_sessions_ended_total", *own, "lease")] == 1


def test_gauges_of_sessions_of_one_env_and_client_are_one() -> None:
    slow = row("0b", step_ms={"p50": 2.0, "p99": 8.0}, leased=True)
    registry = scrapes(([row(), slow, row("0c", key="bob", step_ms=None, cpu=None, memory_bytes=None)], []))
    values = scraped(registry)
    assert values["envhub_sessions", "Cart-v1", "alice"] == 2 and values["envhub_sessions", "Cart-v1", "bob"] == 1
    assert values["envhub_step_p99_seconds", "Cart-v1", "alice"] == 0.008
    assert values["envhub_memory_bytes", "Cart-v1", "alice"] == 20 * MIB
    assert values["envhub_leased_sessions", "Cart-v1", "alice"] == 1
    assert values["envhub_longest_request_seconds", "Cart-v1", "alice"] == 3.0
    assert values["envhub_failures_total", "limit"] == 2 and values["envhub_env_unready", "Sim-v0"] == 1


def test_number_of_labels_is_bounded_and_no_label_is_a_session() -> None:
    many = [row(f"{n:04x}", env=f"Sim-v{n}") for n in range(PAIRS_MAX + 50)]
    registry = scrapes((many, []))
    values = scraped(registry)
    own = [labels for name, *labels in values if name == "envhub_sessions"]
    assert len(own) == PAIRS_MAX + 1 and values["envhub_sessions", OTHER, OTHER] == 50
    assert not {each["session"] for each in many} & {label for labels in own for label in labels}


def test_hub_that_does_not_answer_is_down() -> None:
    def lost() -> Look:
        raise HubLost("it does not answer")

    registry = prometheus_client.CollectorRegistry()
    HubCollector(lost, "box", registry)
    assert scraped(registry) == {("envhub_up",): 0}


# --- tables -----------------------------------------------------------------------------------------------------------


def test_rows_of_tables_have_no_lists_and_name_the_env_that_a_worker_is_at() -> None:
    (worker,), session = worker_rows([row(label="sweep 3")]), session_row(row(label="sweep 3"), ())
    assert worker["doing"] == "step of env 1" and worker["envs"] == "0, 1" and worker["env_p99"] == 2.0
    assert session["env"] == "sweep 3 · Cart-v1" and session["client"] == "alice" and session["p99"] == 4.0
    assert not [value for value in (*worker.values(), *session.values()) if isinstance(value, list | dict)]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_limits_of_the_web_page_are_the_codes() -> None:
    assert [number for _, number, _ in limits("The web page")] == [
        page.CONNECTIONS_MAX,
        process.BACKLOG,
        process.PASSWORD_CHARS_MIN,
        gate.FAILURE_S,
        gate.FAILURES_MAX,
        gate.FORM_BYTES_MAX,
        contents.LOOK_S,
        contents.SERIES_MAX,
        process.LOG_LINES_MAX,
        page.LINES_SHOWN,
        contents.FRAME_S,
        contents.FRAMES_MAX,
        contents.FILMS_MAX,
        metrics.PAIRS_MAX,
    ]
