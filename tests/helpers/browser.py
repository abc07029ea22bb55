"""A headless Chromium for the tests of pages, driven by selenium; a test without it is skipped with a line that says why."""

import shutil

import pytest

SMALL, LARGE = (390, 844), (1280, 900)


def open_browser():
    """Return a browser, or skip the test where there is none."""
    pytest.importorskip("selenium", reason="selenium is not installed: pip install 'rampup[browser]'")
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in paths:
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(paths[1]))


def look_like(driver, *, size=LARGE, dark=False):
    """Give the page the size and the preferred colours of a device."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == SMALL}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
