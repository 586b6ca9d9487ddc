"""The report in a real browser, from disk and without a network."""

import base64
import gzip
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bokeh", reason="the report extra is not installed")

from lightrl.programs import main
from lightrl.report.page import LIMIT, build_page
from lightrl.report.run_files import read_runs
from tests.report.conftest import EVIL, HACK, a_sample, write_run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The Chromium of the system, offline. Debian and Ubuntu: apt-get install chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )
    if not found:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])  # root has no user namespaces
        yield started
        started.close()


class Opened:
    """A page of the browser, and everything that went wrong on it."""

    def __init__(self, browser: Any, file: Path) -> None:
        self.page = browser.new_context(offline=True, viewport={"width": 1400, "height": 900}).new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("body[data-ready=yes]", timeout=60_000)

    def _hear(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.errors.append(said.text)

    def rows(self, column: str) -> list[str]:
        """The cells of a column of the list."""
        heads = self.page.locator("#list th").all_text_contents()
        place = next(index for index, head in enumerate(heads) if head.split()[0] == column)
        cells: list[str] = self.page.locator(f"#list tbody tr td:nth-child({place + 1})").all_text_contents()
        return cells


@pytest.mark.slow
def test_the_report_opens_from_disk_and_works(browser: Any, run_folder: Path, tmp_path: Path) -> None:
    assert main(["report", str(run_folder)]) == 0
    written = (run_folder / "report.html").read_text()
    assert not any(text in written for text in ("onerror", HACK))  # what a model wrote is data only
    opened = Opened(browser, run_folder / "report.html")
    page = opened.page
    assert opened.requests == [(run_folder / "report.html").as_uri()]

    # The planted hack ranks first, and is shown.
    assert opened.rows("response")[0] == HACK
    assert "addresses the grader" in page.locator("#fields").text_content()
    assert "The reward stopped rising at about step" in page.locator("#findings").text_content()

    # A click shows the sample: the hostile response is text, and its tokens are coloured.
    page.fill("#search", "onerror")
    assert opened.rows("step") == ["13"]
    page.locator("#list tbody tr").first.click()
    assert page.locator("#prompt").text_content() == EVIL
    assert page.locator("#response .token").all_text_contents() == ["1", "3", "."]
    colors = page.locator("#response .token").evaluate_all("all => all.map(one => one.style.backgroundColor)")
    assert colors[0] == colors[1] != colors[2]
    page.select_option("#color", "mask")
    assert "grey: not trained" in page.locator("#scale").text_content()
    assert page.title() == "run"
    assert page.locator("img").count() == 0

    # Search, sort and pages.
    page.fill("#search", "29+0")
    assert opened.rows("prompt") == ["29+0="] * 4
    page.fill("#search", "")
    page.click("#list th[data-column=step]")
    assert opened.rows("step")[:5] == ["30"] * 4 + ["29"]
    page.click("#list th[data-column=step]")
    assert opened.rows("step")[:5] == ["1"] * 4 + ["2"]
    page.click("#next")
    assert page.locator("#page").text_content() == "26 to 50 of 122"

    # The curves are drawn, those of a closed section when it is opened.
    assert page.locator(".chart .bk-Figure").count() == page.locator("details[open] .chart").count() > 2
    page.locator("summary", has_text="All other metrics").click()
    page.wait_for_selector("details:last-of-type .bk-Figure")
    assert "temperature" in page.locator("#options").text_content()
    assert "1.25" in page.locator("#options").text_content()
    assert opened.errors == []


@pytest.mark.slow
def test_runs_are_compared(browser: Any, run_folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", rewards=[0.1] * 12, samples=[a_sample(1, 0, 0)], lr=3e-3)
    (tmp_path / "both.html").write_text(build_page(read_runs([run_folder, other])))
    opened = Opened(browser, tmp_path / "both.html")
    options = opened.page.locator("#options tbody td:first-child").all_text_contents()
    assert options == ["lr", "max_steps", "temperature"]
    opened.page.select_option("#of-run", "1")
    assert opened.rows("run") == ["other"]
    assert opened.errors == []


CALL = '<tool_call>{"name": "add"}</tool_call>'
HEARD = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_an_episode_is_shown_turn_by_turn(browser: Any, tmp_path: Path) -> None:
    turns = [
        {"text": f"I add.{CALL}<|im_end|>", "is_own": True, "is_trained": True, "reward": 0.25},
        {"text": HEARD, "is_own": False, "is_trained": False},
        {"text": f"{EVIL} {CALL}", "is_own": False, "is_trained": False},
        {"text": "5", "is_own": True, "is_trained": False},
    ]
    run = write_run(tmp_path / "run", rewards=[0.1], samples=[a_sample(1, 0, 0, turns=turns), a_sample(1, 1, 0)])
    (tmp_path / "page.html").write_text(build_page(read_runs([run])))
    opened = Opened(browser, tmp_path / "page.html")
    page = opened.page
    page.fill("#search", "add")
    assert opened.rows("position") == ["0"]
    page.locator("#list tbody tr").first.click()
    heads = ["policy, trained, reward 0.25", "tool, not trained", "not the policy, not trained", "policy, not trained"]
    assert page.locator(".turn b").all_text_contents() == heads
    assert page.locator(".turn pre").all_text_contents() == [turn["text"] for turn in turns]
    assert page.locator(".turn .call").all_text_contents() == [CALL]  # of the policy's own text
    assert page.locator(".turn.trained").count() == 1
    assert "is_trained" not in page.locator("#fields").text_content()
    page.fill("#search", "")
    page.locator("#list tbody tr").last.click()
    assert page.locator("#detail-title").text_content() == "step 1, prompt 1, sample 0"
    assert not page.locator("#turns").is_visible()
    assert page.locator("img").count() == 0
    assert opened.errors == []


def test_the_turns_of_an_episode_are_no_longer_than_a_text(tmp_path: Path) -> None:
    turns = [{"text": "x" * 15_000, "is_trained": True}, {"text": "y" * 7_000, "is_trained": False}, {"text": "zz"}]
    run = write_run(tmp_path / "run", rewards=[0.1], samples=[a_sample(1, 0, 0, turns=turns)])
    (shown,) = json.loads(gzip.decompress(base64.b64decode(logged(build_page(read_runs([run]))))))
    assert [len(turn["text"]) for turn in shown["turns"][:-1]] == [15_000, 5_000]
    assert shown["turns"][-1] == {"text": "[... 2002 more characters]"}


def logged(page: str) -> str:
    return page.partition('id="logged">')[2].partition("</script>")[0]


def test_a_long_run_stays_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.report.page.LIMIT", 700_000)  # of which the library takes 470,000
    draws = random.Random(0)
    texts = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz 0123456789", k=2000)) for _ in range(100)]
    samples = [a_sample(index // 4 + 1, 0, index % 4, response=text) for index, text in enumerate(texts)]
    samples.append(a_sample(30, 0, 0, response=HACK + "x" * 30_000))
    run = write_run(tmp_path / "long", rewards=[draws.random() for _ in range(3000)], samples=samples)
    page = build_page(read_runs([run]))
    assert len(page.encode()) <= 700_000 < LIMIT
    assert "of 101 logged samples are shown, the most suspicious and others spread over the run" in page
    assert "a curve of 3000 steps is drawn with about" in page
    assert "texts are cut off after 20000 characters" in page
