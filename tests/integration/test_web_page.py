"""The web page's process of a real hub: metrics, probes, who is admitted, and that it ends without the hub noticing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hubs import ServedHub, below, lives, serve, wait_until

import envhub

pytest.importorskip("nicegui")
parser = pytest.importorskip("prometheus_client.parser")

PASSWORD = "correct horse"
BEARER = {"Authorization": f"Bearer {PASSWORD}"}
UNITS = ("_seconds", "_bytes", "_bytes_max", "_total", "_info", "_per_second")
# Numbers of things, which have no unit.
COUNTS = re.compile(
    r"envhub_(up|draining|env_unready|connections|descriptors(_max)?|cpus|cpus_used|(\w+_)?sessions|envs|workers|\w+_free)"
)


class Page:
    """The page of a hub, for programs that are no browsers."""

    def __init__(self, hub: ServedHub, besides: int = 0) -> None:
        """The page of a hub that listens at no port, or at this one."""
        self.hub = hub
        self.process = psutil.Process(hub.process.pid)
        listening = (each for each in self.process.net_connections("inet") if each.status == psutil.CONN_LISTEN)
        self.port = next(each.laddr.port for each in listening if each.laddr.port != besides)
        assert wait_until(lambda: self.get("/livez")[0] == 200)

    def get(self, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), {name.lower(): text for name, text in answer.getheaders()}

    def metrics(self) -> dict[str, Any]:
        """The families of a scrape, by name."""
        status, text, _ = self.get("/metrics", **BEARER)
        assert status == 200, text
        return {family.name: family for family in parser.text_string_to_metric_families(text)}

    def pids(self) -> list[int]:
        return [pid for pid, _ in below(self.process, "envhub-web")]


@contextlib.contextmanager
def page_of(folder: Path, *arguments: str, password: str = PASSWORD) -> Iterator[Page]:
    options = (*arguments, "--web", "127.0.0.1:0")
    environ = {"ENVHUB_WEB_PASSWORD": password}
    with serve(folder, *options, binds=[f"ipc://{folder}/hub.sock"], environ=environ) as hub:
        yield Page(hub)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("web")
    (folder / "kept/run 1").mkdir(parents=True)
    for name in ("kept/run 1/a.mp4", "kept/notes.txt", "other.mp4"):
        (folder / name).write_bytes(name.encode())
    (folder / "kept/link.mp4").symlink_to(folder / "other.mp4")
    options = ("--web-films", str(folder / "kept"))
    with page_of(folder, "counter=sims:counter", "gone=no_such_package:make", *options) as page:
        yield page


# --- metrics and probes -----------------------------------------------------------------------------------------------


def test_metrics_name_their_units_and_count_what_sessions_do(page: Page) -> None:
    before = page.metrics()
    with contextlib.closing(envhub.make_vec("counter", 3, hub=page.hub.ipc)) as envs:
        envs.reset(seed=0)
        for _ in range(20):
            envs.step([1, 1, 1])
        assert wait_until(lambda: [each.value for each in page.metrics()["envhub_envs"].samples] == [3])
        assert page.metrics()["envhub_envs"].samples[0].labels["env"] == "counter"
    assert wait_until(lambda: not page.metrics()["envhub_envs"].samples)
    after = page.metrics()
    assert before["envhub_up"].samples[0].value == after["envhub_up"].samples[0].value == 1
    # The steps of a session count when it has ended, too.
    steps = [sum(each.value for each in families["envhub_steps"].samples) for families in (before, after)]
    assert steps[1] - steps[0] >= 60
    assert {sample.labels["env"] for sample in after["envhub_env_unready"].samples} == {"gone"}
    for name, family in after.items():
        full = f"{name}_total" if family.type == "counter" else name
        assert full.endswith(UNITS) or COUNTS.fullmatch(full) or name.startswith("envhub_web_process"), full
        assert not {"session", "pid"} & {label for sample in family.samples for label in sample.labels}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is missing")
def test_promtool_finds_nothing_wrong_in_the_metrics(page: Page) -> None:
    text = page.get("/metrics", **BEARER)[1]
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.long
def test_probes_need_no_password_and_ready_is_not_a_hub_that_drains(tmp_path: Path) -> None:
    with page_of(tmp_path, "counter=sims:counter") as page:
        assert [page.get(path)[:2] for path in ("/livez", "/readyz")] == [(200, "ok"), (200, "ok")]
        with (
            contextlib.closing(envhub.make_vec("counter", 1, hub=page.hub.ipc)),
            envhub.connect(page.hub.ipc) as client,
        ):
            client.drain(message="an upgrade")
            assert wait_until(lambda: page.get("/readyz")[0] == 503)
            assert page.get("/readyz")[1] == "draining" and page.get("/livez")[0] == 200
            assert page.metrics()["envhub_draining"].samples[0].value == 1
        assert page.hub.process.wait(30) == 0


@pytest.mark.long
def test_hub_whose_envs_are_all_missing_is_not_ready(tmp_path: Path) -> None:
    with page_of(tmp_path, "gone=no_such_package:make", "lost=no_such_package:make") as page:
        assert wait_until(lambda: page.get("/readyz")[0] == 503)
        text = page.get("/readyz")[1]
        assert text.startswith("no env can be made: ") and "no_such_package" in text


@pytest.mark.long
@pytest.mark.timeout(900)
def test_memory_stays_flat_over_ten_thousand_scrapes(page: Page) -> None:
    (pid,) = page.pids()
    sizes = []
    with contextlib.closing(envhub.make_vec("counter", 2, hub=page.hub.ipc)) as envs:
        envs.reset()
        for n in range(10_000):
            assert page.get("/metrics", **BEARER)[0] == 200
            if n % 100 == 0:
                envs.step([1, 1])
            if n % 1000 == 999:
                sizes.append(psutil.Process(pid).memory_info().rss)
    assert max(sizes[2:]) - sizes[1] < 8 << 20, sizes


# --- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_only_who_knows_the_password_sees_the_page_and_other_sites_see_nothing(page: Page) -> None:
    assert page.get("/")[0] == page.get("/metrics")[0] == page.get("/frame/0a/0")[0] == 401
    assert page.get("/metrics", Authorization="Bearer wrong password")[0] == 401
    assert page.get("/metrics", Host="evil.example", **BEARER)[0] == 403
    assert page.get("/metrics", Origin="http://evil.example", **BEARER)[0] == 403
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    assert page.get("/login", "POST", "password=wrong", **form)[0] == 401
    assert page.get("/login", "POST", "password=correct+horse", Origin="http://evil.example", **form)[0] == 403
    # Nobody makes the page keep a body, or fail, before it knows him.
    assert page.get("/login", "POST", f"password={'x' * 5000}&a=1", **form)[0] == 401
    assert page.get("/login", "POST", "--b--", Content_Type="multipart/form-data; boundary=")[0] == 401
    assert page.get("/metrics", Host="[")[0] == page.get("/metrics", Origin="http://[")[0] == 403
    assert page.get("/frame/zz/0", **BEARER)[0] == 409
    assert "web_output" not in page.hub.log
    status, _, headers = page.get("/login", "POST", "password=correct+horse", **form)
    cookie = headers["set-cookie"]
    assert (status, headers["location"]) == (303, "/") and {"HttpOnly", "SameSite=lax"} <= {*cookie.split("; ")}
    status, text, headers = page.get("/", Cookie=cookie.partition(";")[0], Accept="text/html")
    assert status == 200 and "EnvHub" in text and headers["content-security-policy"].startswith("default-src 'self'")
    assert page.get("/?token=correct+horse")[2]["location"] == "/"
    # The page's own connection, which a browser opens for any site.
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "a" * 22 + "==",
    }
    socket_path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    assert page.get(socket_path, **upgrade)[0] in (401, 403)
    assert page.get(socket_path, Cookie=cookie.partition(";")[0], Origin="http://evil.example", **upgrade)[0] == 403


def command(*arguments: str, prefix: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    program = f"{prefix}\nimport sys\nfrom envhub.cli import main\nsys.argv = ['envhub', *{[*arguments]!r}]\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ, **environ}
    )


@pytest.mark.long
def test_what_the_page_lacks_is_said_before_the_hub_starts(tmp_path: Path) -> None:
    public = "serve", "CartPole-v1", "--web", "0.0.0.0:0"
    (tmp_path / "open").write_text("long enough\n")
    (tmp_path / "short").write_text("short\n")
    (tmp_path / "short").chmod(0o600)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        own = ("serve", "CartPole-v1", "--web", f"127.0.0.1:{taken.getsockname()[1]}")
        answers = [
            (command(*own, prefix="import sys\nsys.modules['nicegui'] = None"), 'run `pip install "envhub-rl[web]"`'),
            (command(*own), "Address already in use; choose another address"),
            (command(*public), "give a password by --web-password-file FILE or ENVHUB_WEB_PASSWORD"),
            (
                command(*public, "--web-proxy", "https://lab.example"),
                "serve at 127.0.0.1 and have a reverse proxy there",
            ),
            (command(*public, "--web-password-file", str(tmp_path / "open")), "must be a file of yours with mode 0600"),
            (command(*public, "--web-password-file", str(tmp_path / "short")), "at least 8 characters"),
            (command(*public, ENVHUB_WEB_PASSWORD="short"), "at least 8 characters"),
            (command("serve", "--web", "8265"), "is no address"),
            (command("serve", "--web", "localhost:0", "--web-proxy", "lab.example/hub"), "--web-proxy"),
        ]
    for answer, text in answers:
        assert answer.returncode == 2 and text in answer.stderr and answer.stderr.count("\n") == 1, answer.stderr


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_death_of_the_page_is_noticed_by_no_session_and_another_one_takes_its_place(tmp_path: Path) -> None:
    with (
        page_of(tmp_path, "counter=sims:counter") as page,
        contextlib.closing(envhub.make_vec("counter", 2, hub=page.hub.ipc)) as envs,
    ):
        envs.reset()
        (pid,) = page.pids()
        os.kill(pid, signal.SIGKILL)
        for count in range(100):
            assert envs.step([1, 1])[0][0][0] == count + 1
        assert wait_until(lambda: page.pids() not in ([], [pid]))
        assert wait_until(lambda: page.get("/livez")[0] == 200)  # at the same port
        (event,) = (line for line in map(json.loads, page.hub.log.splitlines()) if line["event"] == "web_ended")
        assert event["why"] == "its status was -9"
        assert page.metrics()["envhub_sessions"].samples[0].value == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_page_ends_with_its_hub_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    with page_of(tmp_path, "counter=sims:counter") as page:
        tree = page.process.children(recursive=True)
        assert page.pids()
        page.hub.stop(number)
        assert wait_until(lambda: not any(map(lives, tree)))
        with pytest.raises(ConnectionRefusedError):  # an ended connection may hold the port, so no bind is tried
            socket.create_connection(("127.0.0.1", page.port))
        left = {path.suffix for path in tmp_path.iterdir()}
        assert left == {".log"} or (number == signal.SIGKILL and left <= {".log", ".sock", ".lock", ".side"})


@pytest.mark.long
def test_hub_without_an_ipc_address_gets_one_for_its_page_which_a_proxy_may_show(tmp_path: Path) -> None:
    options = "counter=sims:counter", "--web", "127.0.0.1:0", "--web-proxy", "https://lab.example"
    with serve(tmp_path, *options, binds=["tcp://127.0.0.1:0"], environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as hub:
        page = Page(hub, besides=int(hub.tcp.rpartition(":")[2]))
        with envhub.connect(f"ipc://{tmp_path}/envhub/web-{page.port}.sock") as client:
            assert client.health()["status"] == "ok"
        for origin, host, status in (
            ("https://lab.example", "lab.example", 200),
            ("https://lab.example", f"127.0.0.1:{page.port}", 200),
            ("https://evil.example", "lab.example", 403),
            ("https://lab.example", "evil.example", 403),
        ):
            assert page.get("/metrics", Origin=origin, Host=host)[0] == status


def test_films_of_a_folder_are_shown_and_no_other_files(page: Page) -> None:
    assert page.get("/film/run%201/a.mp4", **BEARER)[:2] == (200, "kept/run 1/a.mp4")
    for name in ("notes.txt", "../other.mp4", "%2e%2e/other.mp4", "link.mp4", "none.mp4"):
        assert page.get(f"/film/{name}", **BEARER)[0] == 404
    text = page.get("/?tab=Replays", Accept="text/html", **BEARER)[1]
    assert "run 1/a.mp4" in text and "link.mp4" not in text
