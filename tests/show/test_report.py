"""Tests of rampup.show.report: the content of the page, and its behaviour in a real
browser.
"""

import base64
import json
import re
import shutil
from dataclasses import replace

import pytest
from helpers.html import Page

import rampup
from rampup import Config, build_plan
from rampup.config.schema import KEYS
from rampup.errors import ConfigError
from rampup.plan.describe import summary
from rampup.show.notebook import html_table
from rampup.show.report import Report, report_html, write_report
from rampup.show.series import RunMetrics

CONFIG = Config(
    enable_rampup_batch_size=True,
    ici_pipeline_parallelism=4,
    per_device_batch_size=4,
    run_name="seven",
)
SMALL, LARGE = (390, 844), (1280, 900)
EVIL = '</script><script>document.title="hacked"</script>&"\'<b>'


def metrics(plan, name="a", steps=40):
    """Return made-up metrics of the plan's first steps, one of whose losses is not
    finite.
    """
    lines = []
    for step in range(steps):
        position = plan.position(step)
        size = position.split.global_batch_size
        line = {
            "step": step,
            "consumed_samples": position.consumed_samples + size,
            "phase": position.phase.index,
        }
        line |= {
            "global_batch_size": size,
            "loss": None if step == 7 else 5 - step / 20,
            "tokens_per_second": 900.0,
        }
        lines.append(line)
    return RunMetrics.from_lines(name, lines, [{"step": steps - 1, "eval_loss": 3.25}])


def made(**change):
    """Return a report with everything in it."""
    plan = build_plan(CONFIG, 8)
    rates = {"samples": lambda step: step / 1000, "steps": lambda step: 0.1}
    facts = {
        "plan": plan,
        "config": CONFIG,
        "rates": rates,
        "run": metrics(plan),
        "notes": ("mind the gap",),
    }
    return Report(**{"title": "my run"} | facts | change)


def test_report_contains_everything_and_loads_nothing():
    """The plan, every phase, every key with its meaning, notes, pictures and the
    metrics of the run.
    """
    report = made()
    page = Page(html := report_html(report))
    text = " ".join(page.text)
    said = (
        "mind the gap",
        f"Written by rampup {rampup.__version__}",
        "last evaluation loss",
        "3.25",
    )
    assert all(part in text for part in (*summary(report.plan), *said, *KEYS))
    changed = [attrs for _, attrs in page.elements if attrs.get("class") == "changed"]
    assert len(changed) == 3  # per_device_batch_size, the stages, the name
    pictures = {
        attrs["alt"]: attrs["src"] for tag, attrs in page.elements if tag == "img"
    }
    assert pictures.keys() == {
        "metrics",
        "batch, passes and bubble",
        "learning rate",
        "timetable",
    }
    drawn = base64.b64decode(pictures["metrics"].partition(",")[2]).decode()
    assert "tokens_per_second" in drawn
    # No element names another file or host, the page's policy forbids it to load one,
    # and every identifier is unique.
    assert not any(word in html for word in ("http://", "https://", "@import"))
    assert all(source.startswith("data:") for source in pictures.values())
    assert not [
        attrs for tag, attrs in page.elements if attrs.get("src") and tag != "img"
    ]
    links = [attrs["href"] for _, attrs in page.elements if attrs.get("href")]
    names = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert {link for link in links if link != "data:,"} <= {
        f"#{name}" for name in names
    }
    assert len(set(names)) == len(names)
    policy = next(
        attrs["content"]
        for _, attrs in page.elements
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")


def test_report_escapes_text():
    """Titles, notes, values, places, run names and cells cannot become elements."""
    report = made(
        title=EVIL, notes=(EVIL,), run=metrics(build_plan(CONFIG, 8), name=EVIL)
    )
    config = replace(CONFIG, grain_train_files=EVIL)
    others = {"Other": {"cell": html_table([{EVIL: EVIL}])}}
    text = report_html(replace(report, config=config, others=others))
    assert EVIL not in text
    assert "<script>document" not in text
    page = Page(text)
    assert EVIL in "".join(page.text)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "b" not in {tag for tag, _ in page.elements}


def test_report_counts_rows_that_it_leaves_out_and_marks_unreached_phases():
    """Of three thousand phases, the page counts the rows that it leaves out; a phase
    beyond the run is in italics.
    """
    config = Config(
        batch_size_schedule=" ".join(f"{20_000 * n}:{n + 1}" for n in range(3000)),
        steps=10**6,
    )
    text = report_html(Report(title="x", plan=build_plan(config, 1)))
    assert "2,940 more rows" in text
    assert len(text) < 500_000
    text = report_html(
        Report(
            title="x",
            plan=build_plan(Config(enable_rampup_batch_size=True, steps=150), 4),
        )
    )
    assert text.count('<tr class="unreached">') == 2
    assert "The run ends before the phases in italics" in text


@pytest.mark.parametrize("name", ["page.pdf", "page", "nowhere/page.html", "."])
def test_write_report_refuses_bad_paths(tmp_path, name):
    """Another suffix, no folder, a folder: refused by name."""
    with pytest.raises(ConfigError) as caught:
        write_report(made(), tmp_path / name)
    assert caught.value.key == "output"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A headless Chromium that shows the report; a test without it is skipped with a
    line that says why.
    """
    pytest.importorskip(
        "selenium", reason="selenium is not installed: pip install 'rampup[browser]'"
    )
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in paths:
        pytest.skip(
            "Chromium is not installed: apt-get install chromium chromium-driver"
        )
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    driver = webdriver.Chrome(options=options, service=Service(paths[1]))
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(made(), path)
    driver.report = path.as_uri()
    yield driver
    driver.quit()


def open_page(driver, *, size=LARGE, dark=False):
    """Open the report on a device of a size and with preferred colours."""
    width, height = size
    metrics = {
        "width": width,
        "height": height,
        "deviceScaleFactor": 1,
        "mobile": size == SMALL,
    }
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.get_log("performance")
    driver.get(driver.report)


def contrast(driver):
    """Return the contrast between the page's text and its ground, as WCAG counts it."""
    colours = driver.execute_script(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    )

    def light(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [
            part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
            for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(light, colours))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser_report_fits_and_is_quiet(driver, size, dark):
    """On a phone and a desktop, light and dark: no console message, no request, no
    sideways scrolling, readable text.
    """
    open_page(driver, size=size, dark=dark)
    assert driver.get_log("browser") == []
    sent = [
        json.loads(entry["message"])["message"]
        for entry in driver.get_log("performance")
    ]
    asked = {
        entry["params"]["request"]["url"]
        for entry in sent
        if entry["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in asked if not url.startswith("data:")} == {driver.report}
    assert (
        driver.execute_script("return document.documentElement.scrollWidth") <= size[0]
    )
    assert contrast(driver) > 7
    for picture in driver.find_elements("css selector", "figure img"):
        assert picture.size["width"] > 300  # it scrolls where the page is narrower


@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser_theme_is_toggled(driver, dark):
    """The page starts in the theme of the system, and its button switches it."""
    open_page(driver, dark=dark)
    button = driver.find_element("id", "theme")

    def ground():
        return driver.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )

    before = ground()
    assert button.text == ("Light theme" if dark else "Dark theme")
    button.send_keys("\ue007")  # Enter
    assert ground() != before
    assert button.text == ("Dark theme" if dark else "Light theme")
    button.click()
    assert ground() == before


def test_in_a_browser_keys_are_filtered(driver):
    """Words in the filter leave the keys that contain them, and their sections."""
    open_page(driver, size=SMALL)
    driver.find_element("id", "filter").send_keys("warmup")
    rows = driver.find_elements("css selector", "#keys tbody tr")
    left = [row.text for row in rows if row.is_displayed()]
    assert left
    assert len(left) < 5
    assert all("warm" in row.lower() for row in left)
