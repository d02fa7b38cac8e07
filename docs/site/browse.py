# SPDX-License-Identifier: Apache-2.0
"""browse SITE: what readers do, in headless Chromium and from the folder, without a server.

At 360 pixels, light and dark: no page of guides and references scrolls sideways or prints an error, and axe finds
nothing serious. Tabs switch, and the search finds a function.
"""

from __future__ import annotations

import pathlib
import shutil
import sys

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

# Made by other programs, or listings of sources.
LEFT_OUT = {"java", "csharp", "source"}


def look(page: Page, site: pathlib.Path, file: pathlib.Path) -> list[str]:
    """What is wrong with a page."""
    name = file.relative_to(site)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(f"{name}: {error}"))
    page.on("console", lambda message: message.type == "error" and errors.append(f"{name}: {message.text}"))
    page.goto(file.as_uri())
    if page.evaluate("[...document.querySelectorAll('html, .content')].some(e => e.scrollWidth > e.clientWidth)"):
        errors.append(f"{name}: scrolls sideways")
    # Without preload, in which axe would read style sheets, as a page of a folder may not.
    for fault in Axe().run(page, options={"preload": False}).response["violations"]:
        if fault["impact"] in ("serious", "critical"):
            errors.append(f"{name}: {fault['help']}: {fault['nodes'][0]['html'][:120]}")
    return errors


def use(page: Page, site: pathlib.Path) -> list[str]:
    """What does not work."""
    errors = []
    page.goto((site / "index.html").as_uri())
    code = page.locator("pre", has_text="gradaccum.torch.SGD")
    before = code.is_visible()
    page.locator("label", has_text="torch").click()
    if before or not code.is_visible():
        errors.append("index.html: the tab of torch does not switch")
    page.locator("input[name=q]").first.fill("ga_step")
    page.locator("input[name=q]").first.press("Enter")
    found = page.locator("ul.search li a").first
    found.wait_for(timeout=20000)
    if found.get_attribute("href") != "c/accumulate-and-step.html#c.ga_step":
        errors.append(f"search.html: ga_step is not found first, but {found.get_attribute('href')}")
    return errors


def main() -> int:
    """Prints what is wrong."""
    site = pathlib.Path(sys.argv[1]).resolve()
    files = [file for file in sorted(site.rglob("*.html")) if file.relative_to(site).parts[0] not in LEFT_OUT]
    errors = [] if files else [f"{site} has no page"]
    with sync_playwright() as playwright:
        # Without a sandbox of its own, which it lacks the rights for as root; it opens this site alone.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            window = browser.new_context(viewport={"width": 360, "height": 800}, color_scheme=scheme)
            window.set_default_timeout(120000)
            for file in files:
                with window.new_page() as page:
                    errors += [f"{scheme}: {error}" for error in look(page, site, file)]
        errors += use(browser.new_page(viewport={"width": 1280, "height": 900}), site)
        browser.close()
    print("\n".join(errors), end="\n" if errors else "")
    return 1 if errors else 0


sys.exit(main())
