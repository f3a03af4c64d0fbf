# SPDX-License-Identifier: Apache-2.0
"""Time between frames of the console's pages while they are scrolled, with much in them.

Command: ``python -m bench.console``. Chromium without a screen shows the console's own pages over recorded
data: the store's page with 10,000 blocks, and the sessions' page with 500 sessions. Each is scrolled from end
to end for three seconds while its data is replaced every half second, four times as often as in reality; the
reference is an empty page of the same browser, scrolled alike. What it can't show: a graphics card.
"""

from __future__ import annotations

import asyncio
import statistics

from bench.report import measured, options, p99
from tests.e2e.browser import chromium
from tests.e2e.test_console import synthetic

SCROLL = """
const done = arguments[arguments.length - 1];
const table = document.querySelector(".virtual");
const inside = table && table.scrollHeight > table.clientHeight ? table : document.scrollingElement;
const frames = [];
const began = performance.now();
let last = began;
const step = (now) => {
  frames.push(now - last);
  last = now;
  const place = Math.abs(Math.sin((now - began) / 900));
  inside.scrollTop = place * (inside.scrollHeight - inside.clientHeight);
  if (now - began < 3000) requestAnimationFrame(step);
  else done(frames.slice(1));
};
requestAnimationFrame(step);
"""

REPLACE = """
(async () => {
  const { StorePage } = await import("/console/static/store.js");
  const { SessionsPage } = await import("/console/static/sessions.js");
  const name = location.pathname.split("/")[2];
  const found = await (await fetch(`/console/${name}.json`)).json();
  const page = new (name === "store" ? StorePage : SessionsPage)(new URLSearchParams());
  document.getElementById("main").replaceChildren(page.element);
  page.update(found);
  setInterval(() => page.update(found), 500);
})();
"""
EMPTY = "document.body.innerHTML = '<div style=\"height: 9000px\"></div>'"


def frames_of(base: str) -> dict[str, list[float]]:
    """Milliseconds between frames, by page."""
    found: dict[str, list[float]] = {}
    with chromium() as driver:
        for name, label in (("store", "10,000 blocks"), ("sessions", "500 sessions")):
            driver.get(f"{base}/console/{name}")
            driver.execute_script(REPLACE)
            driver.implicitly_wait(10)
            driver.find_element("css selector", "tbody tr[data-row]")
            found[label] = driver.execute_async_script(SCROLL)
        driver.get("about:blank")
        driver.execute_script(EMPTY)
        found["an empty page (reference)"] = driver.execute_async_script(SCROLL)
    return found


async def frames() -> dict[str, list[float]]:
    async with synthetic() as base:
        return await asyncio.to_thread(frames_of, base)


if __name__ == "__main__":
    arguments = options(__doc__, "bench.console").parse_args()
    with measured("console", arguments) as result:
        table = result.table(
            "page",
            ("frames", 0),
            ("median, ms", 1),
            ("p99, ms", 1),
            ("longest, ms", 1),
            title="between frames",
        )
        for name, gaps in asyncio.run(frames()).items():
            table.add(
                name,
                float(len(gaps)),
                statistics.median(gaps),
                p99(gaps),
                max(gaps),
                samples={"ms": gaps},
            )
