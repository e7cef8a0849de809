"""What the benchmarks of the dial read from runs and tell them: python -m unittest tests/bench/train_run_test.py"""

from __future__ import annotations

import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import auto_sweep  # noqa: E402
import dial  # noqa: E402
import launch  # noqa: E402
import train_run  # noqa: E402

FULL, NONE = (4, 4, 4), (1, 1, 1)


def run(layouts: list[train_run.Degrees], step_ms: list[float], seconds: dict[int, float]) -> train_run.TrainRun:
    records = zip(layouts, step_ms, strict=True)
    steps = [{"step": at, "degrees": list(layout), "step_ms": ms} for at, (layout, ms) in enumerate(records, 1)]
    return train_run.TrainRun(steps, seconds, "")


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

    def test_what_bytes_need_on_a_link(self) -> None:
        change = {"link_bytes": 125e6, "needed_seconds": 7.0}
        self.assertEqual(dial.needed_seconds(change, "1gbit"), 1.0)
        self.assertEqual(dial.needed_seconds(change, "gloo"), 7.0)


class Sweep(unittest.TestCase):
    def test_every_layout_is_there_once(self) -> None:
        layouts = auto_sweep.all_layouts(4)
        self.assertEqual((len(layouts), len(set(layouts))), (10, 10))
        self.assertTrue(all(4 % o == 0 and o % g == 0 and g % p == 0 for p, g, o in layouts))


if __name__ == "__main__":
    unittest.main()
