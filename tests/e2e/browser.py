# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium without a screen, for tests of the console's pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "no Chromium here: run scripts/install-servers"


@contextmanager
def chromium(theme: str = "light", width: int = 1280) -> Iterator[Any]:
    """A driver whose pages have ``width`` and prefer ``theme``; skips the test where there is no browser."""
    if not (CHROMIUM and DRIVER):
        pytest.skip(MISSING)
    webdriver = pytest.importorskip("selenium.webdriver", reason=MISSING)
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        preferred = [{"name": "prefers-color-scheme", "value": theme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": preferred})
        yield driver
    finally:
        driver.quit()


def requested_urls(driver: Any) -> list[str]:
    """Addresses that the pages have requested since the last call."""
    messages = [json.loads(row["message"])["message"] for row in driver.get_log("performance")]
    sent = [
        one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in sent if not url.startswith(("data:", "blob:", "chrome"))]


def errors_of(driver: Any) -> list[str]:
    """Errors on the browser's console: scripts that failed, and what the content security policy refused."""
    return [row["message"] for row in driver.get_log("browser") if row["level"] == "SEVERE"]


LOW_CONTRASTS = """
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [x, y, z] = [r, g, b].map((v) => linear(v / 255));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour.length < 4 || colour[3] > 0.99) return colour;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const has_text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!has_text || !element.checkVisibility()) continue;
  const style = getComputedStyle(element);
  const front = element instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [light(parse(front)), light(behind(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const name = `${element.tagName}.${element.className.baseVal ?? element.className}`;
  if (ratio < 4.5) found.push(`${name} "${element.textContent.trim().slice(0, 30)}" ${ratio.toFixed(2)}`);
}
return found;
"""
"""Script that returns visible elements whose text has a contrast below 4.5 to 1."""

UNNAMED = """
const named = (element) =>
  element.getAttribute("aria-label") || element.labels?.length || element.textContent.trim() || element.title;
return [...document.querySelectorAll("button, a, input, select, [tabindex='0'], [role='img'], canvas")]
  .filter((element) => element.checkVisibility() && !named(element))
  .map((element) => element.outerHTML.slice(0, 120));
"""
"""Script that returns elements which a screen reader could not name."""
