"""What the benchmarks of the dial read from runs and tell them: python -m unittest tests/bench/train_run_test.py"""

from __future__ import annotations

import json
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import auto_sweep  # noqa: E402
import dial  # noqa: E402
import launch  # noqa: E402
import report  # noqa: E402
import train_run  # noqa: E402

FULL, NONE = (4, 4, 4), (1, 1, 1)


def run(layouts: list[train_run.Degrees], step_ms: list[float], seconds: dict[int, float]) -> train_run.TrainRun:
    records = zip(layouts, step_ms, strict=True)
    steps = [{"step": at, "degrees": list(layout), "step_ms": ms} for at, (layout, ms) in enumerate(records, 1)]
    return train_run.TrainRun(steps, seconds, "", {})


class TrainRun(unittest.TestCase):
    def test_changes_are_where_the_degrees_differ(self) -> None:
        told = run([FULL, FULL, NONE, FULL], [1, 1, 1, 1], {2: 0.5})
        expected = [
            {"step": 2, "from": FULL, "to": NONE, "seconds": 0.5},
            {"step": 3, "from": NONE, "to": FULL, "seconds": None},
        ]
        self.assertEqual(told.changes(), expected)

    def test_the_first_steps_after_a_change_do_not_count(self) -> None:
        times = run([FULL, FULL, FULL, NONE, NONE, FULL, FULL], [90, 10, 12, 80, 5, 70, 14], {}).step_ms(dropped=1)
        self.assertEqual(times, {FULL: 12, NONE: 5})

    def test_a_part_of_the_steps(self) -> None:
        told = run([FULL, FULL, NONE, NONE, FULL, FULL], [9, 1, 9, 2, 9, 3], {})
        self.assertEqual(told.step_ms(end=4), {FULL: 1, NONE: 2})
        self.assertEqual(told.step_ms(begin=3), {FULL: 3, NONE: 2})

    def test_seconds_are_read_from_what_the_run_says(self) -> None:
        line = "step 30: P=4 G=4 O=4 -> P=1 G=1 O=1 in 12.5 ms, 12 MB moved (schedule)"
        self.assertEqual(train_run.CHANGE.findall(line), [("30", "12.5", "ms")])

    def test_a_schedule_begins_after_the_first_layout_and_skips_what_does_not_change(self) -> None:
        none = {"parameters": 1, "gradients": 1, "optimizer": 1}
        self.assertEqual(train_run.schedule_of([FULL, NONE, NONE], 5), [{"step": 5, "degrees": none}])


class Dial(unittest.TestCase):
    def test_losses_may_differ_by_rounding_only(self) -> None:
        def with_losses(*losses: float) -> launch.Run:
            return launch.Run({"losses": list(losses)}, 0, 0, 0, 0)

        dial.same_losses(with_losses(2.0, 1.9999), with_losses(2.0, 1.9998, 1.9))
        with self.assertRaisesRegex(RuntimeError, "loss of step 1 is 1.9"):
            dial.same_losses(with_losses(2.0, 1.9), with_losses(2.0, 1.8))

    def test_runs_that_do_the_same_are_one_timeline(self) -> None:
        def timeline(speeds: list[float], seconds: float) -> train_run.TrainRun:
            one = run([FULL, FULL, NONE], [1] * 3, {2: seconds})
            for record, speed in zip(one.steps, speeds, strict=True):
                record["tokens_per_second"] = speed
            return one

        runs = [timeline([10, 20, 30], 0.1), timeline([11, 5, 31], 0.3), timeline([12, 21, 32], 0.2)]
        steps = dial.steps_of(runs)
        self.assertEqual([step["tokens_per_second"] for step in steps], [11, 20, 31])
        self.assertEqual((steps[1]["low"], steps[1]["high"]), (5, 21))
        self.assertEqual(dial.changes_of(runs), [{"step": 2, "from": "4", "to": "1", "seconds": 0.2}])

    def test_what_bytes_need_on_a_link(self) -> None:
        change = {"link_bytes": 125e6, "needed_seconds": 7.0}
        self.assertEqual(dial.needed_seconds(change, "1gbit"), 1.0)
        self.assertEqual(dial.needed_seconds(change, "gloo"), 7.0)

    def test_each_part_keeps_where_and_when_it_was_measured(self) -> None:
        old = {"machine": {}, "date": "then"}
        self.assertEqual(dial.about_parts({"about": old, "links": {"gloo": []}}), {"table": old, "gloo": old})
        parts = {"table": old, "gloo": {"machine": {}, "date": "now"}}
        self.assertEqual(dial.about_parts({"about": parts, "links": {"gloo": [], "1gbit": []}}), parts)
        self.assertEqual(dial.about_parts({}), {})

    def test_shared_memory_is_held_to_the_bound_of_links(self) -> None:
        def change(seconds: float) -> dict:
            return {"from": 4, "to": 2, "bytes": 2e9, "link_bytes": 7, "seconds": seconds, "needed_seconds": 0.5}

        about = report.about() | {"rounds": 2}
        data = {"live": [{"changes": [change(1)]}, {"changes": [change(2)]}], "about": {"table": about}}
        text = dial.markdown(data)
        self.assertIn("| shm | 4 → 2 | 2,000 MB | 1.50 | 0.50 | 3.00 (2.00 to 4.00) |", text)
        self.assertNotIn("shm: ", text)
        data |= {"links": {"1gbit": dial.link_rows([[change(1)]], "1gbit")}}
        data["about"]["1gbit"] = about | {"rounds": 1}
        text = dial.markdown(data)
        self.assertIn("| 1gbit | 4 → 2 | 0 MB | 1.00 | 0.00 | - |", text)
        self.assertRegex(text, r"\nshm: .* medians over 2 rounds, .*\n\n1gbit: .* medians over 1 rounds, ")


class Sweep(unittest.TestCase):
    def test_jobs_that_were_not_asked_for_stay(self) -> None:
        def row(name: str, ratio: float) -> dict:
            return {"job": {"name": name}, "ratio": ratio}

        rows = auto_sweep.with_row([row("S b1", 1.0), row("S b1 1gbit", 1.2)], row("M b8", 1.1))
        self.assertEqual([each["job"]["name"] for each in rows], ["S b1", "M b8", "S b1 1gbit"])
        self.assertEqual(auto_sweep.with_row(rows, row("S b1", 1.3))[0], row("S b1", 1.3))

    def test_a_file_of_old_says_of_each_job_when_it_was_measured(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "auto_sweep.json")
            self.assertEqual(auto_sweep.measured_before(file), [])
            rows = [{"about": {"date": "then"}, "halves_differ": 1}, {"about": {}, "halves_differ": 2}]
            written = {"about": {"date": "then"}, "jobs": [{"halves_differ": 1}, rows[1], {"ratio": 1}]}
            file.write_text(json.dumps(written))
            self.assertEqual(auto_sweep.measured_before(file), rows)

    def test_it_has_settled_when_its_first_search_ends(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "job.jsonl")
            said = {8: "trying: predicted 1 ms", 23: "kept: measured (predicted): P=1", 90: "measured (predicted): P=2"}
            lines = [{"facts": {}}, {"step": 7}, *({"step": at, "decision": {"why": why}} for at, why in said.items())]
            record.write_text("".join(json.dumps(line) + "\n" for line in lines))
            self.assertEqual(auto_sweep.searches(record), [23, 90], "that it stays is a decision, too")

    def test_the_best_is_timed_where_it_was_not_chosen(self) -> None:
        # Each half finds another one, which the other half does not confirm: neither is worse than "the best".
        halves = [{FULL: 8.0, NONE: 10.0}, {FULL: 10.0, NONE: 8.0}]
        self.assertAlmostEqual(auto_sweep.of_the_best(NONE, halves), (8 / 10 + 10 / 10) / 2)
        self.assertAlmostEqual(auto_sweep.of_the_best(FULL, halves), (10 / 10 + 8 / 10) / 2)
        self.assertEqual(auto_sweep.of_the_best(FULL, [{FULL: 2.0, NONE: 1.0}] * 2), 2)

    def test_every_layout_is_there_once(self) -> None:
        layouts = auto_sweep.all_layouts(4)
        self.assertEqual((len(layouts), len(set(layouts))), (10, 10))
        self.assertTrue(all(4 % o == 0 and o % g == 0 and g % p == 0 for p, g, o in layouts))


if __name__ == "__main__":
    unittest.main()
