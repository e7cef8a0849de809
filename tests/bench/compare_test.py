"""bench/compare.py, without what takes a quiet machine: run with `python -m unittest tests/bench/compare_test.py`."""

from __future__ import annotations

import functools
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = Path("/nonexistent")
sys.path.insert(0, str(ROOT / "bench"))

import cases  # noqa: E402
import compare  # noqa: E402
import launch  # noqa: E402
import memory  # noqa: E402
import report  # noqa: E402
import warm  # noqa: E402


def run(tokens_per_second: float, **changes: object) -> launch.Run:
    figures = {
        "tokens_per_second": tokens_per_second,
        "step_ms": [1e3 / tokens_per_second],
        "parameters": 10,
        "tokens_per_step": 64,
        "precision": "fp32",
        "losses": [6.2, 6.2, 6.3],
    } | changes
    return launch.Run(report=figures, peak_pss=int(tokens_per_second), peak_rss=1, cpu_seconds=1.0, seconds=1.0)


@functools.cache
def beside() -> ProcessPoolExecutor:
    """A process with one thread, of which ranks can be copies: that of the tests has more. It ends with this one."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=warm.prepare)


class Summary(unittest.TestCase):
    def test_ratios_are_taken_within_a_round(self) -> None:
        # The machine is twice as slow in the second round: the ratio does not change.
        fsdp2, ours = report.summarize([{"fsdp2": run(100), "ours": run(150)}, {"fsdp2": run(50), "ours": run(75)}])
        self.assertEqual(fsdp2.ratio, report.Spread(1, 1, 1))
        self.assertEqual(ours.ratio, report.Spread(1.5, 1.5, 1.5))
        self.assertEqual((ours.tokens_per_second.low, ours.tokens_per_second.high), (75, 150))
        self.assertEqual((ours.memory, ours.memory_ratio), (150, 1.5))

    def test_a_candidate_that_failed_later_keeps_its_rounds(self) -> None:
        fsdp2, ours = report.summarize([{"fsdp2": run(100), "ours": run(150)}, {"fsdp2": run(80)}])
        self.assertEqual(ours.ratio, report.Spread(1.5, 1.5, 1.5))
        self.assertEqual(fsdp2.tokens_per_second.median, 90)

    def test_a_ceiling_has_the_optimizers_share_of_one_rank(self) -> None:
        alone = {"step_ms": [100, 120, 100], "optimizer_ms": [20, 40, 20], "ranks": 4}
        (one,) = report.with_ceilings([{"plain": run(640, **alone), "ddp": run(500), "ours-plain": run(800, **alone)}])
        self.assertEqual(list(one), ["plain", "ceiling", "ddp", "ours-plain", "ours-ceiling"])
        self.assertEqual(one["ceiling"].report["step_ms"], [85, 90, 85])
        self.assertAlmostEqual(one["ceiling"].report["tokens_per_second"], 64 / 0.085)
        self.assertEqual((one["plain"].report["step_ms"], one["ceiling"].peak_pss), ([100, 120, 100], 0))
        rows = report.summarize([one])
        self.assertEqual([report.is_ours(row.candidate) for row in rows], [False] * 5)
        entry = {"summary": report.as_json(rows), "about": report.about() | {"rounds": 1, "steps": 3}}
        self.assertIn(
            "ceiling: computation + 1/N of the optimizer (PyTorch) | 85 | 753 |  |  |  |",
            report.markdown("tiny", entry),
        )
        self.assertFalse(cases.is_candidate("ceiling"))

    def test_without_the_reference_there_is_no_ratio(self) -> None:
        (ours,) = report.summarize([{"ours": run(150)}])
        self.assertIsNone(ours.ratio)
        entry = {"summary": report.as_json([ours]), "about": report.about() | {"rounds": 1, "steps": 2}}
        self.assertEqual(report.summaries_of(entry), [ours])
        self.assertIn("| Tesserae, C++ | 7 | 150 |", report.markdown("tiny", entry).replace("**", ""))


class Goals(unittest.TestCase):
    def test_what_was_reached_stands_beside_what_was_asked(self) -> None:
        rounds = [{"fsdp2": run(100), "ours-ceiling": run(300), "ours": run(270)}]
        text = report.goals({"A": {"rounds": [{name: asdict(one) for name, one in rounds[0].items()}]}}, NOWHERE)
        self.assertIn("| A | Tesserae, C++ | FSDP2 | tokens/s >= 2.60 x | 2.70 (2.70 to 2.70) |", text)
        self.assertIn("| tokens/s >= 0.95 x | 0.90", text)
        self.assertIn("| memory <= 0.80 x | 2.70 |", text)
        self.assertNotIn("| B |", text)

    def test_the_best_layout_stands_for_itself(self) -> None:
        rounds = [{"fsdp2": asdict(run(10)), "ours": asdict(run(20)), "ours:2,2,2": asdict(run(32))}]
        self.assertIn(
            "| D | Tesserae, C++, P=2 G=2 O=2 | FSDP2 | tokens/s >= 3.20 x | 3.20",
            report.goals({"D": {"rounds": rounds}}, NOWHERE),
        )

    def test_host_cost_and_shared_memory_have_their_lines(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            costs = ({"fsdp2": 1000, "sharded": 20, "tesserae": 40}, {"fsdp2": 1200, "sharded": 20, "tesserae": 60})
            rounds = [{mode: {"per_unit_us": cost} for mode, cost in one.items()} for one in costs]
            Path(folder, "host_cost.json").write_text(json.dumps({"rounds": rounds}))
            seconds = {"gloo": [0.9, 0.8], "tesserae": [0.1, 0.2], "copy": [0.1, 0.1]}
            verbs = dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"), seconds)
            file = Path(folder, "transport.json")
            file.write_text(json.dumps({"mib": 64.0, "seconds": {"2": verbs}}))
            text = report.goals({}, Path(folder))
            self.assertIn(
                "| host cost | Tesserae, C++ | FSDP2 | µs a unit and step <= 1/20 | 1/55 (1/60 to 1/50) |", text
            )
            face = "Tesserae, Python, FSDP1's script"
            self.assertIn(f"| host cost | {face} | FSDP2 | µs a unit and step <= 1/8 | 1/22 (1/25 to 1/20)", text)
            reached = "Gloo | speed >= 8.00 x | 6.50 (4.00 to 9.00) |"
            self.assertIn(f"| 64 MiB, 2 ranks | `all_gather_into_tensor` in shared memory | {reached}", text)
            self.assertEqual(len(text.splitlines()), 6)
            file.write_text(json.dumps({"mib": 1, "seconds": {"2": verbs}}))
            self.assertNotIn("MiB", report.goals({}, Path(folder)))


class Fairness(unittest.TestCase):
    def test_equal_runs_pass(self) -> None:
        compare.check("tiny", [{"fsdp2": run(1), "ours": run(2)}])

    def test_other_models_data_or_numbers_are_refused(self) -> None:
        for change in (
            {"parameters": 11},
            {"tokens_per_step": 32},
            {"precision": "bf16"},
            {"losses": [2.0, 2.0, 2.0]},
            {"losses": [float("nan")] * 3},
        ):
            with self.subTest(change), self.assertRaises(RuntimeError):
                compare.check("tiny", [{"fsdp2": run(1), "ours": run(1, **change)}])

    def test_so_are_they_in_an_earlier_round(self) -> None:
        first = {"fsdp2": run(1), "ours": run(1, losses=[2.0, 2.0, 2.0])}
        with self.assertRaisesRegex(RuntimeError, "differ in losses"):
            compare.check("tiny", [first, {"fsdp2": run(1), "ours": run(1)}])

    def test_one_forward_shows_nothing_of_training(self) -> None:
        one = run(1, losses=[6.2])
        with self.assertRaisesRegex(RuntimeError, "has 1 losses, 3 are compared"):
            compare.check("E", [{"fsdp2": one, "ours": one}])
        slow = mock.patch.object(report, "computes_bf16", return_value=False)
        with slow, redirect_stderr(io.StringIO()):
            few = compare.for_case("E", Namespace(rounds=5, steps=3, warmup=1))
        self.assertGreaterEqual(few.steps + few.warmup, compare.LEAST_STEPS)

    def test_a_command_line_with_too_few_steps_is_refused(self) -> None:
        argv = "compare.py --cases tiny --steps 1 --warmup 0".split()
        with mock.patch.object(sys, "argv", argv), redirect_stderr(io.StringIO()) as said:
            self.assertRaises(SystemExit, compare.parse)
        self.assertIn("3 steps together", said.getvalue())


class Controls(unittest.TestCase):
    """Ranks that train wrongly, for compare.check() to refuse: a check that no wrong run fails shows nothing."""

    PROGRAM = "import sys; sys.path.insert(0, {folder!r}); import peers, torch; {fault}; peers.main()"
    FAULTS = {
        "ranks keep their gradients to themselves": "peers.WRAP['ddp'] = peers.WRAP['plain']",
        "the optimizer never updates": "torch.optim.AdamW.step = lambda *_, **__: None",
    }

    def train(self, case: cases.Case, mode: str = "ddp", fault: str = "pass") -> launch.Run:
        program = self.PROGRAM.format(folder=str(ROOT / "bench"), fault=fault)
        words = [sys.executable, "-c", program, "--mode", mode, *case.arguments(), "--steps", "3", "--warmup", "1"]
        return beside().submit(launch.launch, words, case.ranks, deadline=300).result()

    def refuses(self, case: cases.Case) -> None:
        with mock.patch.dict(cases.CASES, {"control": case}):
            right = {mode: self.train(case, mode) for mode in ("fsdp2", "ddp")}
            compare.check("control", [right])
            for name, fault in self.FAULTS.items():
                with self.subTest(name), self.assertRaisesRegex(RuntimeError, "differ in losses"):
                    compare.check("control", [right | {"ddp": self.train(case, fault=fault)}])

    def test_in_fp32(self) -> None:
        self.refuses(cases.CASES["tiny"])

    def test_in_bf16(self) -> None:
        # As small as shows it: the less there is to learn in four steps, the less a fault changes.
        wider = {"dimension": 512, "layers": 2, "heads": 8, "vocabulary": 4096, "sequence": 64}
        self.refuses(replace(cases.CASES["tiny"], precision="bf16", **wider))


class Missing(unittest.TestCase):
    """What was asked for and not measured is no success, whatever else was measured."""

    def status(self, outcome: dict[str, Exception]) -> int:
        def run_of(candidate: str, *_: object) -> launch.Run:
            if candidate in outcome:
                raise outcome[candidate]
            return run(100)

        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(compare, "run", run_of),
            mock.patch.object(compare, "imports_bytes", return_value=2**20),
            mock.patch.object(sys, "argv", f"compare.py --cases tiny --candidates ddp,fsdp2 --out {folder}".split()),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            return compare.main()

    def test_all_there(self) -> None:
        self.assertEqual(self.status({}), 0)

    def test_one_that_can_not_run_here(self) -> None:
        self.assertEqual(self.status({"ddp": launch.Unavailable("no backend")}), launch.UNAVAILABLE)

    def test_one_that_breaks(self) -> None:
        self.assertEqual(self.status({"ddp": RuntimeError("broke")}), 1)
        self.assertEqual(self.status({"ddp": RuntimeError("broke"), "fsdp2": launch.Unavailable("no")}), 1)
        self.assertEqual(self.status({"fsdp2": RuntimeError("broke"), "ddp": launch.Unavailable("no")}), 1)

    def test_a_whole_case(self) -> None:
        with mock.patch.object(compare, "compare", side_effect=launch.Unavailable("no root")):
            self.assertEqual(self.status({}), launch.UNAVAILABLE)


def killed_at_once(times: int) -> set[int | None]:
    command, environment = [sys.executable, "-c", "import time; time.sleep(60)"], launch.rank_environment(0, 1, 0)
    ends = set()
    for _ in range(times):
        with (
            tempfile.TemporaryDirectory() as folder,
            launch.Ranks([command], [environment], Path(folder, "log")) as ranks,
        ):
            pass
        ends |= {process.returncode for process in ranks.processes}
    return ends


class Warm(unittest.TestCase):
    """Ranks that are copies of a process which has imported torch end as others do, and none is used for figures."""

    def run_of(self, program: str, *words: str) -> launch.Run:
        command = [sys.executable, "-c", program, *words]
        return beside().submit(launch.launch, command, 2, deadline=60).result()

    def test_a_copy_has_its_own_words_and_variables(self) -> None:
        told = self.run_of(
            "import json, os, sys; was = 'torch' in sys.modules; name, where = sys.argv[1], sys.argv[-1]\n"
            "seen = {'rank': os.environ['RANK'], 'torch': was, 'word': name, 'name': __name__}\n"
            "os.environ['RANK'] == '0' and open(where, 'w').write(json.dumps(seen))",
            "a b",
        )
        self.assertEqual(told.report, {"rank": "0", "torch": True, "word": "a b", "name": "__main__"})
        self.assertGreater(told.cpu_seconds, 0)

    def test_its_end_is_that_of_a_program(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "(?s)ended with 1.*ZeroDivisionError"):
            self.run_of("1 / 0")
        with self.assertRaisesRegex(RuntimeError, "(?s)ended with 1.*enough of it"):
            self.run_of("import sys; sys.exit('enough of it')")
        with self.assertRaisesRegex(RuntimeError, "ended with -9"):
            self.run_of("import os; os.kill(os.getpid(), 9)")
        unavailable = "import sys; print('no such device'); sys.exit(77)"
        with self.assertRaisesRegex(launch.Unavailable, "no such device"):
            self.run_of(unavailable)

    def test_it_can_be_killed_as_soon_as_it_is_started(self) -> None:
        self.assertEqual(beside().submit(killed_at_once, 20).result(), {-signal.SIGKILL})

    def test_what_it_measures_is_not_for_documents(self) -> None:
        argv = "compare.py --cases tiny --warm --update-docs".split()
        with mock.patch.object(sys, "argv", argv), redirect_stderr(io.StringIO()) as said:
            self.assertRaises(SystemExit, compare.parse)
        self.assertIn("not for documents", said.getvalue())


class Candidates(unittest.TestCase):
    def test_ours_takes_a_strategy_or_degrees(self) -> None:
        def end_of(candidate: str, words: int) -> list[str]:
            return cases.command(candidate, Path("bench_step"), cases.CASES["D"])[-words:]

        self.assertEqual(end_of("ours:ZERO_2", 2), ["--strategy", "ZERO_2"])
        self.assertEqual(end_of("ours:2,2,4", 2), ["--degrees", "2,2,4"])
        self.assertEqual(end_of("fsdp2-grad-op", 4), ["--mode", "fsdp2", "--strategy", "SHARD_GRAD_OP"])
        self.assertEqual(end_of("fsdp2-hybrid", 4), ["--strategy", "HYBRID_SHARD", "--degree", "2"])
        self.assertEqual(end_of("ours-python", 2), ["--mode", "tesserae"])
        self.assertEqual(cases.title("ours:2,2,4"), "Tesserae, C++, P=2 G=2 O=4")
        self.assertFalse(cases.is_candidate("fsdp2:ZERO_2"))
        self.assertFalse(cases.is_candidate("fsdp3"))

    def test_layouts_are_all_that_divide(self) -> None:
        self.assertEqual(cases.layouts(2), ["1,1,1", "1,1,2", "1,2,2", "2,2,2"])
        self.assertEqual(len(cases.layouts(4)), 10)


class Models(unittest.TestCase):
    def test_titles_say_how_large_they_are(self) -> None:
        import torch

        from peers import MODELS, default_feed_forward
        from transformer import Shape, parameter_count

        for name, case in cases.CASES.items():
            sizes = {"kv_heads": case.heads, "feed_forward": default_feed_forward(case.dimension)}
            fields = ("dimension", "layers", "heads", "vocabulary", "sequence")
            shape = Shape(**sizes, **{field: getattr(case, field) for field in fields})
            millions = parameter_count(MODELS[case.model][0](shape, torch.device("meta"))) / 1e6
            told = float(case.title.partition(" M ")[0])
            self.assertAlmostEqual(millions, told, delta=0.5 if told >= 1 else 0.05, msg=name)

    def test_the_second_model_has_no_candidates_in_cpp(self) -> None:
        self.assertNotIn("ours", cases.candidates_of(cases.CASES["A/gpt2"]))
        self.assertEqual(cases.candidates_of(cases.CASES["A/gpt2"], ["fsdp2", "ours", "ours:2,2,2"]), ["fsdp2"])
        self.assertEqual(compare.models_of("A", Namespace(candidates=[])), ["A", "A/gpt2"])
        self.assertEqual(compare.models_of("A", Namespace(candidates=["ours"])), ["A"])
        self.assertEqual(compare.models_of("E", Namespace(candidates=[])), ["E"])
        end = cases.command("fsdp2-prefetch", NOWHERE, cases.CASES["A/gpt2"])[2:]
        self.assertEqual(end, ["--mode", "fsdp2", "--model", "gpt2", "--prefetch", "2"])


class Headline(unittest.TestCase):
    def test_a_row_a_case_and_model_against_the_best_line_of_fsdp2(self) -> None:
        speeds = {"fsdp2": (100, 50), "fsdp2-prefetch": (110, 55), "fsdp1": (50, 25), "ddp": (200, 100)}
        speeds["ours-python"] = (220, 88)
        first, second = ({name: run(both[at]) for name, both in speeds.items()} for at in (0, 1))
        about = report.about() | {"rounds": 2, "steps": 3}
        entry = {"about": about, "rounds": [{name: asdict(one) for name, one in r.items()} for r in (first, second)]}
        text = report.headline({"A": entry, "A/gpt2": entry})
        cells = "154 | 1.80 (1.60 to 2.00) | 3.96 | 0.99 |  | 2.20 |  |"  # memory: of fsdp2, which needs less
        self.assertIn(f"| A, Llama style: 118 M parameters, 128 tokens a rank, 2 ranks, fp32 | {cells}", text)
        self.assertIn(f"| A, GPT-2 style: 109 M parameters, 128 tokens a rank, 2 ranks, fp32 | {cells}", text)
        sentence = text.replace("\n", " ").partition(". ")[0]
        self.assertIn("trains 1.60 to 2.00 times as many tokens a second as torch's FSDP2", sentence)
        self.assertIn("0.99 to 0.99 times as many as DDP", sentence)
        self.assertIn("128 to 128 tokens a rank", sentence)
        self.assertIn("the peers over Gloo", sentence)
        self.assertEqual(report.headline({}), "")


class Markers(unittest.TestCase):
    def test_only_what_stands_between_them_changes(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "page.md")
            file.write_text("a\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nb\n")
            self.assertTrue(report.update_between_markers(file, "bench", "new\n\n"))
            self.assertEqual(file.read_text(), "a\n<!-- bench:begin -->\nnew\n<!-- bench:end -->\nb\n")
            self.assertFalse(report.update_between_markers(file, "other", "new"))
            self.assertFalse(report.update_between_markers(Path(folder, "missing.md"), "bench", "new"))

    def test_the_case_in_bf16_alone_leaves_the_others_tables(self) -> None:
        updated = []
        with mock.patch.object(compare, "update", lambda document, marker, text: updated.append(marker)):
            compare.update_documents({}, Path())
        self.assertEqual(updated, [])


class Launch(unittest.TestCase):
    PROGRAM = "import json, os, sys, time\nrank, file = os.environ['RANK'], sys.argv[sys.argv.index('--json') + 1]\n"

    def launch(self, body: str, deadline: float = 60) -> launch.Run:
        return launch.launch([sys.executable, "-c", self.PROGRAM + body], 2, deadline)

    def test_ranks_see_torchruns_variables_and_rank_0_reports(self) -> None:
        done = self.launch("if rank == '0': json.dump({'size': os.environ['WORLD_SIZE']}, open(file, 'w'))")
        self.assertEqual(done.report, {"size": "2"})
        self.assertGreater(done.peak_rss, 0)

    @unittest.skipUnless("Pss_File" in Path("/proc/self/smaps_rollup").read_text(), "an old kernel")
    def test_memory_that_is_held_for_a_moment_is_seen_and_what_ranks_share_counts_once(self) -> None:
        body = """
import mmap
with open(SHARED, "a+b") as memory:
    memory.truncate(64 << 20)
    together = mmap.mmap(memory.fileno(), 64 << 20)
for _ in range(64): together.write(bytes(1 << 20))
time.sleep(2)
alone = b"x" * (96 << 20)
time.sleep(1)
del alone
if rank == '0': json.dump({}, open(file, 'w'))
"""
        # What is dear to read is read next to never.
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, mock.patch.object(memory, "SHARE_OF_TIME", 1e-9):
            peak = self.launch(body.replace("SHARED", repr(f"{folder}/shared"))).peak_pss >> 20
        self.assertGreater(peak, 64 + 2 * 96)
        self.assertLess(peak, 64 + 2 * 96 + 60)  # of an interpreter there are two

    @unittest.skipUnless("Pss_File" in Path("/proc/self/smaps_rollup").read_text(), "an old kernel")
    def test_what_a_copy_has_not_changed_counts_once_where_that_is_asked_for(self) -> None:
        # One write: print() makes two where Python does not buffer, and those of two processes may mix.
        program = "import os, time; kept = b'x' * (96 << 20); os.fork(); os.write(1, b'there\\n'); time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                for _ in range(2):
                    self.assertEqual(process.stdout.readline(), "there\n")
                looks = [memory.Memory(), memory.Memory(copies=True)]
                for look in looks:
                    look.look([process.pid])
            finally:
                for pid in reversed(memory.family(process.pid)):
                    os.kill(pid, signal.SIGKILL)
        self.assertGreater(looks[0].peak >> 20, 2 * 96)
        self.assertGreater(looks[1].peak >> 20, 96)
        self.assertLess(looks[1].peak >> 20, 96 + 60)

    def test_a_failing_rank_ends_the_others_and_its_output_is_shown(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        with self.assertRaisesRegex(RuntimeError, "ended with 3(.|\n)*no such layer"):
            self.launch("if rank == '1': print('no such layer', flush=True); sys.exit(3)\ntime.sleep(600)")
        self.assertEqual(signal.getsignal(signal.SIGTERM), before)

    def test_no_rank_outlives_a_benchmark_that_is_ended(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            note = f"from pathlib import Path; Path({folder!r}, str(os.getpid())).touch(); time.sleep(600)"
            program = f"import launch; launch.launch([{sys.executable!r}, '-c', {self.PROGRAM + note!r}], 2, 600)"
            bench = subprocess.Popen(
                [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT / "bench")}
            )
            while len(pids := [int(file.name) for file in Path(folder).iterdir()]) < 2:
                time.sleep(0.05)
            bench.terminate()
            self.assertEqual(bench.wait(60), 143)
            self.assertEqual([pid for pid in pids if Path(f"/proc/{pid}").exists()], [])

    def test_a_rank_that_can_not_run_here_is_told_from_one_that_broke(self) -> None:
        with self.assertRaisesRegex(launch.Unavailable, "no such backend"):
            self.launch("print('no such backend', flush=True); sys.exit(77)")
        with self.assertRaisesRegex(launch.Unavailable, "no such backend"):  # two ranks wrote at once
            self.launch("print('no such backend\\n', flush=True); sys.exit(77)")

    def test_a_run_that_hangs_is_ended(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "no end after"):
            self.launch("time.sleep(600)", deadline=0.5)


if __name__ == "__main__":
    unittest.main()
