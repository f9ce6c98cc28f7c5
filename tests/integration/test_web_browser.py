"""The web page in a browser: sorted and filtered by keys, followed, and used to end a session of a hub."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_web_page import PASSWORD, Page, page_of

import envhub

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium or its driver is not installed")
WAIT_S = 60.0
FRAMES = "return performance.getEntriesByType('resource').filter(e => e.name.includes('/frame/')).map(e => e.startTime)"


class Browser:
    """A browser at a hub's page."""

    def __init__(self, page: Page, width: int = 1200, password: str = PASSWORD) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
        for each in (*sandbox, "--headless=new", "--disable-dev-shm-usage", f"--window-size={width},900"):
            options.add_argument(each)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        self.url = f"http://127.0.0.1:{page.port}"
        self.driver.get(self.url)
        self.one("input[type=password]").send_keys(password, Keys.ENTER)
        self.wait(lambda: self.all(".q-tab"))

    def wait(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, WAIT_S).until(lambda _: condition())

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        return self.wait(lambda: self.all(selector))[0]

    def texts(self, selector: str) -> list[str]:
        """The texts of these elements, at one time."""
        script = "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText.trim())"
        texts: list[str] = self.driver.execute_script(script, selector)
        return texts

    def button(self, text: str) -> Any:
        buttons = self.wait(lambda: [each for each in self.all("button") if text.lower() in each.text.lower()])
        return buttons[-1]

    def keys(self, *keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(*keys)

    def urls(self) -> set[str]:
        """The addresses that were requested, those of connections too."""
        urls = set()
        for line in self.driver.get_log("performance"):
            event = json.loads(line["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                urls.add(event["params"]["request"]["url"])
            elif event["method"] == "Network.webSocketCreated":
                urls.add(event["params"]["url"])
        return urls


@contextlib.contextmanager
def browsing(page: Page, **options: Any) -> Iterator[Browser]:
    browser = Browser(page, **options)
    try:
        yield browser
    finally:
        browser.driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    envs = "counter=sims:counter", "CartPole-v1", "Acrobot-v1"
    with page_of(tmp_path_factory.mktemp("web"), *envs, password=f"{PASSWORD}\nonly a viewer") as page:
        yield page


def test_operator_sorts_filters_and_ends_a_session_by_keys_and_its_trainer_reads_why(page: Page) -> None:
    hub, label = page.hub.ipc, "<img src=x onerror=document.title='run'>"
    with (
        contextlib.closing(envhub.make_vec("CartPole-v1", 3, hub=hub)) as first,
        contextlib.closing(envhub.make_vec("Acrobot-v1", 1, hub=hub, label=label)) as second,
        browsing(page) as browser,
    ):
        first.reset(seed=0)
        second.reset(seed=0)
        envs = "tbody td:nth-child(3)"
        browser.wait(lambda: len(browser.texts(envs)) == 2)
        heading = next(each for each in browser.all("th") if each.text == "Env")
        heading.send_keys(Keys.ENTER)
        browser.wait(
            lambda: [text[-10:] for text in browser.texts(envs)] == [f"{label} · Acrobot-v1"[-10:], "artPole-v1"]
        )
        heading.send_keys(Keys.ENTER)
        browser.wait(lambda: [text[-10:] for text in browser.texts(envs)] == ["artPole-v1", "Acrobot-v1"])
        assert label in browser.texts(envs)[1]  # as a text, which is not run
        browser.keys(Keys.ESCAPE)
        browser.one("body").send_keys("/")
        browser.wait(lambda: browser.driver.switch_to.active_element.tag_name == "input")
        browser.keys("CartPole")
        browser.wait(lambda: browser.texts(envs) == ["CartPole-v1"])
        browser.one("tbody a").send_keys(Keys.ENTER)
        name = first.token[:8]
        browser.wait(lambda: f"Session {name}" in browser.driver.page_source)
        browser.wait(lambda: "CartPole-v1 x 3" in browser.texts(".facts > div > div"))
        browser.button("End").send_keys(Keys.ENTER)
        browser.one(".q-dialog input").send_keys("the GPU is needed")
        browser.button("End it").send_keys(Keys.ENTER)
        browser.wait(lambda: any("has ended" in text for text in browser.texts(".q-notification")))
        with pytest.raises(envhub.SessionLost, match="the GPU is needed"):
            first.step([0, 0, 0])
        browser.driver.get(f"{browser.url}/?tab=Ended")
        browser.wait(lambda: any("the GPU is needed" in text for text in browser.texts("tbody td")))
        assert browser.driver.title == "EnvHub"
        # Nothing of another host is needed.
        assert {url.split("/")[2] for url in browser.urls() if url.startswith(("http", "ws"))} == {
            f"127.0.0.1:{page.port}"
        }
        lines = [line for line in browser.driver.get_log("browser") if line["level"] in ("WARNING", "SEVERE")]
        assert [line["message"] for line in lines if "401" not in line["message"]] == []  # before the password


def test_frames_are_drawn_at_most_ten_times_a_second_and_only_while_they_are_watched(page: Page) -> None:
    with (
        contextlib.closing(
            envhub.make_vec("counter", 2, hub=page.hub.ipc, env_kwargs={"render_mode": "rgb_array"})
        ) as envs,
        browsing(page) as browser,
    ):
        envs.reset()
        browser.driver.get(f"{browser.url}/session/{envs.token[:8]}")
        script = "const image = document.querySelector('.frame'); return image.naturalWidth"
        browser.one(".q-toggle").click()
        browser.wait(lambda: browser.driver.execute_script(script) == 6)
        browser.wait(lambda: len(browser.driver.execute_script(FRAMES)) >= 10)
        times = browser.driver.execute_script(FRAMES)
        assert min(after - before for before, after in itertools.pairwise(times)) >= 95
        browser.one(".q-toggle").click()
        # The last one may be under way.
        browser.wait(lambda: browser.driver.execute_script("return !document.querySelector('.frame').dataset.url"))
        count = len(browser.driver.execute_script(FRAMES))
        envs.step([1, 1])
        before = browser.texts(".facts")
        browser.wait(lambda: browser.texts(".facts") != before)
        assert len(browser.driver.execute_script(FRAMES)) <= count + 1


def test_log_is_followed(page: Page) -> None:
    with browsing(page) as browser:
        browser.one("body").send_keys("6")
        browser.wait(lambda: any("hub_started" in text for text in browser.texts(".nicegui-log div")))
        with contextlib.closing(envhub.make_vec("counter", 1, hub=page.hub.ipc)) as envs:
            name = envs.token[:8]
            browser.wait(lambda: any("session_made" in t and name in t for t in browser.texts(".nicegui-log div")))


def test_viewer_has_nothing_that_acts_and_a_phone_needs_no_scrolling_to_the_side(page: Page) -> None:
    with (
        contextlib.closing(envhub.make_vec("counter", 2, hub=page.hub.ipc)) as envs,
        browsing(page, width=500, password="only a viewer") as browser,
    ):
        envs.reset()
        browser.wait(lambda: any(envs.token[:8] in text for text in browser.texts(".q-card")))
        for path in ("/", "/?tab=Curves", "/?tab=Log", f"/session/{envs.token[:8]}"):
            browser.driver.get(browser.url + path)
            browser.wait(lambda: any("sessions" in text for text in browser.texts(".status")))
            assert browser.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), path
            assert not {"Drain", "End", "Restart a worker"} & {*map(str.strip, browser.texts("button .block"))}
