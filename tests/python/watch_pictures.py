"""Makes docs/images/watch.png and watch-dark.png again: python tests/python/watch_pictures.py (after `make build`)."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from PIL import Image

from chromium import Browser
from watch_fixture import Fixture
from watch_page_test import Watch

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, Browser(Path(scratch) / "profile") as browser:
        job = Fixture(Path(scratch) / "llama-34m", steps=4000)
        job.write(step=2860)
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        stop = threading.Event()
        alive = threading.Thread(target=lambda: [job.now(2860) for _ in iter(lambda: stop.wait(0.5), True)])
        alive.start()
        try:
            with Watch(job.folder) as watch:
                for scheme, name in (("light", "watch.png"), ("dark", "watch-dark.png")):
                    browser.scheme(scheme)
                    browser.open(watch.url)
                    browser.size(1280, 1826)
                    browser.wait_for("document.body.innerText.includes('Rank 3 is slow')")
                    browser.wait_for("document.querySelectorAll('#events li').length > 20")
                    browser.run("document.getElementById('place').hidden = true")  # a folder of this machine
                    browser.screenshot(IMAGES / name, 1280, 1826)
                    picture = Image.open(IMAGES / name).convert("RGB")
                    picture.quantize(256, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)
        finally:
            stop.set()
            alive.join()


if __name__ == "__main__":
    main()
