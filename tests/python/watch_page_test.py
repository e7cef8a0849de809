"""The page of a run in a browser: the real `tesserae watch` on made-up run folders."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Browser
from tesserae import _C
from watch_fixture import Fixture

PROGRAM = Path(_C.__file__).parents[2] / "cli" / "tesserae"


class Watch:
    """`tesserae watch` on a folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [PROGRAM, "watch", str(folder), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://"), self.process.stderr and self.process.stderr.read()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as opened:
        yield opened


def fact(browser: Browser, label: str) -> str:
    script = f"""[...document.querySelectorAll('.fact')].filter((node) => node.firstChild.textContent === {label!r})
      .map((node) => node.lastChild.textContent)[0] || ''"""
    return str(browser.run(script))


def says(browser: Browser, text: str) -> None:
    browser.wait_for(f"document.body && document.body.innerText.includes({json.dumps(text)})")


def drawn(browser: Browser, section: str) -> int:
    """How many colours a chart has: 0 or 1 where nothing is drawn."""
    return int(
        browser.run(f"""(() => {{
          const canvas = document.querySelector('#{section} canvas');
          if (!canvas.width || !canvas.height) return 0;
          const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
          const seen = new Set();
          for (let i = 0; i < data.length; i += 4) seen.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
          return seen.size;
        }})()""")
    )


CHARTS = ["loss", "speed", "stages", "timeline", "memory", "traffic", "load"]


def assert_clean(browser: Browser, url: str) -> None:
    assert browser.complaints == []
    outside = [asked for asked in browser.requested if not asked.startswith((url.split("?")[0], "data:", "about:"))]
    assert outside == []


def test_it_shows_the_slow_rank_and_everything_else(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    Fixture(folder).write(step=300)
    with Watch(folder) as watch:
        browser.open(watch.url)
        says(browser, "Rank 3 is slow in backward on host a: +120 ms a step, 37 % of the job's time.")
        says(browser, "It waited for a processor 61 % of the time")
        browser.wait_for("document.querySelectorAll('#events li').length === 6")
        assert fact(browser, "step") == "300 of 400"
        assert fact(browser, "degrees P · G · O") == "2 · 2 · 4"
        assert fact(browser, "ranks") == "8 on 2 hosts, cpu"
        for chart in CHARTS:
            assert drawn(browser, chart) > 5, chart
        first = browser.run("document.querySelector('#doing tbody tr').innerText")
        assert first.startswith("3") and "slow" in first
        assert browser.run("document.title").startswith("job · 75 %")
        says(browser, "tokens of experts: rank 1 has 1.")
        rows = "[...document.querySelectorAll('#load tbody tr')].map((row) => row.innerText.split('\\t'))"
        assert [row[0] for row in browser.run(rows)] == ["tokens", "tokens of experts", "attended pairs"]
        assert browser.run(rows)[1][1:3] == ["1,536", "1"]
        says(browser, "rank 6 over tcp: 0.3")
        hops = "[...document.querySelectorAll('#links tbody tr')].map((row) => row.className + row.innerText)"
        (bad,) = [text for text in browser.run(hops) if text.startswith("bad")]
        assert "reduce: exchange of 8" in bad and "33.0 MiB" in bad and "6: 0.3" in bad, bad
        # Numbers under the pointer, and for who has no pointer.
        browser.run("document.querySelector('#stages canvas').focus()")
        for _ in range(3):
            browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
        assert "against the median" in browser.run("document.getElementById('tip').textContent")
        browser.run("document.querySelector('#load canvas').focus()")
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
        assert "× the mean" in browser.run("document.getElementById('tip').textContent")
        assert_clean(browser, watch.url)
        assert watch.end() == 0


def test_it_shows_a_slow_link(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    job = Fixture(folder, slow=None)
    job.write(step=300)
    link = {
        "stage": "reduce",
        "seconds": 0.31,
        "share": 0.6,
        "since": 290,
        "why": "exchange of 8 ranks over tcp takes longest",
    }
    job.replace("monitor/now.json", json.loads((folder / "monitor/now.json").read_text()) | {"slow_link": link})
    job.append("monitor/events.jsonl", [{"time": 1, "step": 291, "kind": "slow_link", "text": "steps take longer"}])
    with Watch(folder) as watch:
        browser.open(watch.url)
        says(browser, "What carries the bytes is slow, in reduce: +310 ms a step, 60 % of the job's time.")
        says(browser, "No rank works longer. Exchange of 8 ranks over tcp takes longest. Since step 290.")
        browser.wait_for("document.querySelector('#events li.alarm .kind').innerText === 'slow link'")
        assert_clean(browser, watch.url)


def test_it_follows_the_run_without_jumping(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    job = Fixture(folder)
    job.write(step=100)
    with Watch(folder) as watch:
        browser.open(watch.url)
        says(browser, "No rank is slower than the others.")
        places = """JSON.stringify([...document.querySelectorAll('main .card')].map((card) => {
          const box = card.getBoundingClientRect();
          return [card.id, Math.round(box.top), Math.round(box.height)]; }))"""
        browser.wait_for("document.querySelectorAll('#doing tbody tr').length === 8")
        time.sleep(1.5)
        before = browser.run(places)
        for step in range(101, 104):
            job.metrics(step, step)
            job.timeline(step)
            job.now(step)
            browser.wait_for(f"document.getElementById('facts').innerText.includes('{step} of 400')")
            browser.wait_for(f"document.querySelector('#timeline .readout').textContent.includes('step {step} ')")
        assert browser.run(places) == before
        job.append(
            "monitor/events.jsonl", [{"time": time.time(), "step": 103, "kind": "lost", "text": "<b>rank 7</b>"}]
        )
        says(browser, "<b>rank 7</b>")  # text, never markup
        assert_clean(browser, watch.url)


def test_it_says_that_a_job_died_and_that_it_ended(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    job = Fixture(folder)
    job.write(step=100, when=time.time() - 95)
    with Watch(folder) as watch:
        browser.open(watch.url)
        says(browser, "The job has told nothing for 1 min 3")
        says(browser, "died? silent for 1 min")
        job.now(101)
        says(browser, "No rank is slower than the others.")
        job.now(102, silent=5)
        says(browser, "Rank 5 is stuck on host b: silent for 8 s.")
        job.now(103, state="ended")
        job.replace("summary.json", {"steps": 103, "last_loss": 2.25, "tokens_per_second": 20000.0})
        says(browser, "The run has ended after step 103.")
        says(browser, "It ended well: loss 2.250")
        assert_clean(browser, watch.url)


def test_it_says_that_a_run_failed_and_that_it_was_stopped(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    job = Fixture(folder)
    job.write(step=100)
    summary = {"steps": 100, "last_loss": 2.25, "tokens_per_second": 20000.0}
    kind = "document.getElementById('blame').className"
    pill = "document.getElementById('state').innerText"

    def ended(how: str, when: float | None = None, **told: object) -> None:
        job.replace("summary.json", summary | told)
        job.now(100, state="ended", when=when)
        job.replace("monitor/now.json", json.loads((folder / "monitor/now.json").read_text()) | {"how": how})

    with Watch(folder) as watch:
        browser.open(watch.url)
        says(browser, "No rank is slower than the others.")
        ended("failed")
        says(browser, "The run failed after step 100.")
        assert browser.run(kind) == "card bad"
        assert browser.run(pill) == "failed"
        assert browser.run("document.title").endswith("failed")
        events = [{"time": 1, "step": 100, "kind": kind, "text": "failed"} for kind in ("hang", "ended")]
        job.append("monitor/events.jsonl", events)
        browser.wait_for("document.querySelector('#events li .kind').innerText === 'ended'")
        classes = browser.run("[...document.querySelectorAll('#events li')].map((item) => item.className)")
        assert classes[:2] == ["", "alarm"]
        ended("stopped for its bad numbers", broken_off="step 100: the <b>loss</b> is nan; the run ends")
        says(browser, "Step 100: the <b>loss</b> is nan; the run ends.")  # text, never markup
        says(browser, "The run failed after step 100.")
        assert browser.run(kind) == "card bad"
        ended("stopped, asked by signal 15", stopped_by_signal=15, stopped_by="signal 15")
        says(browser, "The run was stopped after step 100.")
        says(browser, "It was stopped, asked by signal 15: loss 2.250")
        assert browser.run(kind) == "card "
        assert browser.run(pill) == "stopped"
        ended("a rank was lost")
        says(browser, "The ranks meet again after step 100: a rank was lost.")
        assert browser.run(kind) == "card "
        ended("a rank was lost", when=time.time() - 300)
        with Watch(folder) as late:
            browser.open(late.url)
            says(browser, "The run failed after step 100.")
            says(browser, "A rank was lost, and nothing has followed for 5 min")
        browser.open(watch.url)
        ended("done")
        says(browser, "The run has ended after step 100.")
        says(browser, "It ended well: loss 2.250")
        assert browser.run(kind) == "card good"
        # Without a monitor the summary alone tells.
        (folder / "monitor/now.json").unlink()
        job.replace("summary.json", summary | {"broken_off": "step 7: the loss is nan"})
        says(browser, "Step 7: the loss is nan.")
        assert browser.run(pill) == "failed"
        assert "It ended well" not in browser.run("document.body.innerText")
        assert browser.complaints == []


def test_a_rank_not_yet_heard_of_is_not_stuck(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    job = Fixture(folder, slow=None)
    job.write(step=0)

    def unheard(step: int, age: float) -> None:
        now = json.loads((folder / "monitor/now.json").read_text())
        now |= {"time": time.time(), "step": step}
        now["ranks"][2] = {"rank": 2, "step": 0, "stage": None, "unit": None, "for": 0.0, "age": age}
        job.replace("monitor/now.json", now)

    row = "[...document.querySelectorAll('#doing tbody tr')].map((row) => row.innerText.split('\\t'))"
    with Watch(folder) as watch:
        unheard(0, 20.0)
        browser.open(watch.url)
        says(browser, "The first step is not over yet.")
        (cells,) = [cells for cells in browser.run(row) if cells[0].strip() == "2"]
        assert [cell.strip() for cell in cells[1:]] == ["–", "–", "–"]
        unheard(0, 70.0)
        says(browser, "Rank 2 on host a has not been heard of yet, after 1 min 10 s.")
        assert browser.run(row)[0][0].strip() == "2"
        unheard(4, 20.0)
        says(browser, "Rank 2 on host a has not been heard of yet, after 20 s.")
        text = browser.run("document.body.innerText")
        assert "null" not in text and "stuck" not in text
        assert_clean(browser, watch.url)


def test_ranks_that_evaluate_or_save_are_not_stuck(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    job = Fixture(folder, slow=None)
    job.write(step=100)

    def all_do(stages: list[str], seconds: float, step: int = 100, hangs: bool = False) -> None:
        now = json.loads((folder / "monitor/now.json").read_text())
        now |= {"time": time.time(), "step": step, "hangs": hangs}
        for rank, stage in zip(now["ranks"], stages, strict=True):
            rank |= {"stage": stage, "unit": None, "for": seconds, "age": 0.3}
        job.replace("monitor/now.json", now)

    kind = "document.getElementById('blame').className"
    with Watch(folder) as watch:
        all_do(["between"] * 7 + ["agree"], 7)
        browser.open(watch.url)
        says(browser, "All ranks have been between two steps for 7 s.")
        all_do(["between"] + ["agree"] * 7, 90)
        says(browser, "All ranks have been between two steps for 1 min 30 s.")
        assert browser.run(kind) == "card "
        assert browser.run("document.querySelectorAll('#doing tr.bad').length") == 0
        all_do(["between"] + ["agree"] * 7, 91, hangs=True)
        says(browser, "Rank 0 is stuck on host a: for 1 min 31 s in between.")
        all_do(["forward"] * 8, 70, step=0)
        says(browser, "The first step is not over yet.")
        assert browser.run(kind) == "card "
        all_do(["forward"] + ["gather"] * 7, 71, step=0, hangs=True)
        says(browser, "Rank 0 is stuck on host a: for 1 min 11 s in forward.")
        all_do(["forward"] + ["gather"] * 7, 7)
        says(browser, "Rank 0 is stuck on host a: for 7 s in forward.")
        assert_clean(browser, watch.url)


def test_steps_that_are_undone_leave_the_curve(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    job = Fixture(folder)
    job.write(step=100)
    with Watch(folder) as watch:
        browser.open(watch.url)
        says(browser, "100 of 400")
        # The run goes back to step 50, and has come further before the page looks again.
        lines = (folder / "metrics.jsonl").read_text().splitlines()[:50]
        lines += [json.dumps(line | {"loss": 1.0}) for line in job.metrics_lines(51, 120)]
        (folder / "fresh").write_text("".join(line + "\n" for line in lines))
        (folder / "fresh").rename(folder / "metrics.jsonl")
        browser.wait_for("known.curve.step.length === 120")
        assert browser.run("known.curve.step.every((step, i) => step === i + 1)")
        assert browser.run("known.curve.loss.slice(50).every((loss) => loss === 1)")
        assert_clean(browser, watch.url)


def test_ticks_of_any_two_numbers_come_to_an_end(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    Fixture(folder).write(step=100)
    with Watch(folder) as watch:
        browser.open(watch.url)
        says(browser, "100 of 400")

        def ticks(low: str, high: str, wanted: int = 4) -> list[float]:
            return browser.run(f"niceTicks({low}, {high}, {wanted})")

        assert ticks("0", "1") == [0, 0.5, 1]
        assert ticks("-0.3", "0.35") == pytest.approx([-0.2, 0, 0.2])
        assert ticks("1", "1 + Number.EPSILON") == [1]
        assert ticks("2.3", "2.3 + 4e-16") == []
        for low, high in (("1e17", "1e17 + 16"), ("-1e300", "1e300"), ("0", "5e-324"), ("-1.7e308", "1.7e308")):
            assert len(ticks(low, high)) <= 6, (low, high)
        assert len(ticks("0", "1e6", 1000)) <= 1001
        # A loss that does not change but for its last bit is a line through the middle.
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, 101):
                file.write(json.dumps({"step": step, "loss": 1 + step % 2 * 2.0**-52}) + "\n")
        browser.open(watch.url)
        says(browser, "1.000")
        assert drawn(browser, "loss") > 5
        assert_clean(browser, watch.url)


def test_it_goes_on_when_the_server_is_back(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    job = Fixture(folder)
    job.write(step=100)
    with Watch(folder) as watch:
        browser.open(watch.url)
        says(browser, "100 of 400")
        port = watch.url.rstrip("/").rpartition(":")[2]
    says(browser, "The server does not answer")
    says(browser, "100 of 400")
    job.now(101)
    with Watch(folder, "--port", port):
        says(browser, "101 of 400")
        browser.wait_for("document.getElementById('offline').hidden")


def test_it_is_dark_or_light_and_fits_a_telephone(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job-with-a-name-that-is-longer-than-a-telephone-is-wide"
    Fixture(folder).write(step=300)
    with Watch(folder) as watch:
        browser.scheme("dark")
        browser.open(watch.url)
        says(browser, "Rank 3 is slow")
        background = "getComputedStyle(document.body).backgroundColor"
        dark = browser.run(background)
        browser.scheme("light")
        browser.wait_for(f"{background} !== {dark!r}")
        light = browser.run(background)
        browser.run("document.getElementById('theme').click()")
        assert browser.run(background) == dark
        browser.open(watch.url)  # and it is remembered
        says(browser, "Rank 3 is slow")
        assert browser.run(background) == dark
        browser.run("document.getElementById('theme').click()")
        assert browser.run(background) == light
        for width in (360, 768, 1920):
            browser.size(width, 800)
            browser.wait_for("document.querySelectorAll('#events li').length === 6")
            wide = """[...document.querySelectorAll('body *')].filter((node) =>
              node.getBoundingClientRect().right > innerWidth + 0.5 && !node.closest('.scroll, #tip')).map((node) =>
              node.tagName + '#' + node.id + '.' + node.className)"""
            assert browser.run(wide) == [], width
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert_clean(browser, watch.url)


def test_it_copes_with_a_thousand_ranks_and_long_runs(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    job = Fixture(folder, ranks=1000, slow=613, steps=100_000)
    job.write(step=70_000)
    with Watch(folder) as watch:
        begin = time.monotonic()
        browser.open(watch.url)
        says(browser, "Rank 613 is slow in backward on host node-76")
        browser.wait_for("document.querySelector('#loss .readout').textContent.includes('step 70,000')")
        browser.wait_for("document.querySelector('#timeline .readout').textContent.includes('step 70,000')")
        took = time.monotonic() - begin
        print(f"drawn after {took:.1f} s")
        assert took < 30
        assert browser.run("document.querySelectorAll('*').length") < 2000
        for chart in CHARTS:
            assert drawn(browser, chart) > 5, chart
        job.now(70_001)
        says(browser, "70,001 of 100,000")
        slowest = browser.run(
            "(() => { const begin = performance.now(); drawAll(); return performance.now() - begin; })()"
        )
        assert slowest < 2000
        assert_clean(browser, watch.url)


def test_a_folder_with_little_in_it_says_what_to_do(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "job" / "monitor").mkdir(parents=True)
    with Watch(tmp_path / "job") as watch:
        browser.open(watch.url)
        says(browser, "This run has no monitor.")
        for text in (
            "No step has been written yet",
            "No rank has told of a step yet",
            "Nothing has happened yet",
            "Nobody has counted what the ranks have to do",
            "Nothing has been sent in the last step",
        ):
            says(browser, text)
        (tmp_path / "job" / "monitor" / "now.json").write_text("{")
        (tmp_path / "job" / "metrics.jsonl").write_text('{"step": 1, "loss": 9.5}\n{"step": 2, "lo')
        says(browser, "9.500")
        # Not what anybody expects, but JSON: the page lives.
        for odd in (
            "[]",
            '{"time": 1, "job": 7, "ranks": {}, "slow": [{}], "seconds": [[]], "memory": {}, '
            '"load": {"kinds": ["tokens"], "amounts": 7}, "links": {"hops": [{}]}}',
        ):
            (tmp_path / "job" / "monitor" / "now.json").write_text(odd)
            time.sleep(1.5)
        Fixture(tmp_path / "job").now(5)
        says(browser, "No rank is slower than the others.")
        assert_clean(browser, watch.url)


def test_it_says_why_it_cannot_serve(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = subprocess.run([PROGRAM, "watch", *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stdout == "" and done.stderr.count("\n") == 1
        return done.stderr

    assert "there is no folder" in refused(str(tmp_path / "nowhere"))
    assert "not a run's folder" in refused(str(tmp_path))
    Fixture(tmp_path / "runs" / "job").config()
    assert str(tmp_path / "runs" / "job") in refused(str(tmp_path / "runs"))
    with Watch(tmp_path / "runs" / "job") as watch:
        port = watch.url.rstrip("/").rpartition(":")[2]
        assert f"port {port} of 127.0.0.1 is in use" in refused(str(tmp_path / "runs" / "job"), "--port", port)
        assert watch.end() == 0


def test_the_token_leaves_the_address(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "job"
    Fixture(folder).write(step=100)
    with Watch(folder, "--token", "wonder") as watch:
        browser.open(watch.url)
        says(browser, "No rank is slower than the others.")
        assert browser.run("location.search") == ""
        assert_clean(browser, watch.url)


def test_the_dial_turns_where_it_may(tmp_path: Path, browser: Browser) -> None:
    """With a listener in the place of the run's: what a click sends, and what becomes of the answer."""
    folder = tmp_path / "job"
    job = Fixture(folder)
    job.write(step=100)
    heard: list[dict[str, object]] = []
    degrees = [8, 8, 8]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "dial.sock"))
    listener.listen()

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked = json.loads(connection.makefile().readline())
                if asked["ask"] == "turn":
                    heard.append(asked)
                    degrees[:] = asked.get("degrees") or [asked["degree"]] * 3
                    said = {"event": "accepted", "degrees": degrees}
                else:
                    said = {"event": "status", "step": 100, "ranks": 8, "degrees": degrees, "automatic": False}
                    said["offload"] = {"parameters": "device", "gradients": "device", "optimizer": "disk"}
                    said["layouts"] = [
                        {"degrees": [1, 2, 4], "step_seconds": 0.5, "memory_bytes": 3e9},
                        {"degrees": [8, 8, 8], "step_seconds": 1.0, "memory_bytes": 1e9},
                    ]
                connection.sendall((json.dumps(said) + "\n").encode())

    threading.Thread(target=answer, daemon=True).start()
    try:
        button = "[...document.querySelectorAll('#dial .btn')].find((node) => node.textContent === '4')"
        with Watch(folder) as watch:
            browser.open(watch.url)
            says(browser, "--allow-control")
            assert browser.run(f"{button}.disabled")
            assert_clean(browser, watch.url)
            browser.open("about:blank")
            browser.requested.clear()
        with Watch(folder, "--allow-control") as watch:
            browser.open(watch.url)
            stop = threading.Event()
            alive = threading.Thread(target=lambda: [job.now(100) for _ in iter(lambda: stop.wait(0.5), True)])
            alive.start()
            try:
                browser.wait_for(f"({button} || {{disabled: true}}).disabled === false")
                texts = browser.run(
                    "[...document.querySelectorAll('#dial .degrees .btn')].map((node) => node.textContent)"
                )
                assert texts == ["1", "2", "4", "8", "auto"]
                browser.run(f"{button}.click()")
                says(browser, "The run changes to degree 4 at the end of this step.")
                browser.wait_for(f"{button}.getAttribute('aria-pressed') === 'true'")
                assert heard == [{"ask": "turn", "degree": 4}]
                cells = "[...document.querySelectorAll('#dial tbody tr')].map((row) => row.innerText.split('\\t'))"
                (first, second) = browser.run(cells)
                assert [first[0], second[0]] == ["1 · 2 · 4", "8 · 8 · 8"]
                assert "GiB" in first[3] and first[3] != second[3], (first, second)
                says(browser, "optimizer on disk")
                browser.run("document.querySelector('#dial tbody .btn').click()")
                says(browser, "The run changes to 1 · 2 · 4 at the end of this step.")
                assert heard[1:] == [{"ask": "turn", "degrees": [1, 2, 4]}]
            finally:
                stop.set()
                alive.join()
            assert_clean(browser, watch.url)
    finally:
        listener.close()
