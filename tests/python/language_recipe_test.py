"""examples/python/language.py and docs/recipes/language.md: every command of the page runs, at a small size, and what
the recipe trains is what plain transformers and one process train."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.run import get_args_parser
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, GPTNeoXForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

import tesserae as tsm
import tesserae.checkpoint  # as the models: ranks find what is imported here
import tesserae.dial.turning
import tesserae.monitor.watching  # noqa: F401
from ranks import run_ranks
from tesserae import _C

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, PAGE = ROOT / "examples/python/language.py", ROOT / "docs/recipes/language.md"
PROGRAM = Path(_C.__file__).parents[2] / "cli" / "tesserae"
FP32 = 1e-5
STEPS = 12
LARGER = "\n## Larger\n"
SIZE = "--vocabulary 512 --width 32 --layers 2 --length 32 --batch 8 --log-every 1 --evaluate-every 6 --save-every 4"
SMALL = f"{SIZE} --text {Path(os.__file__).parent / 'argparse.py'}"

Records = list[dict[str, Any]]
"""Lines of metrics.jsonl."""


def arguments(run: Path, more: str = "", page: str = "") -> list[str]:
    """`page`: what the script gets on the page; what is behind it is stronger."""
    return shlex.split(f"{page} {SMALL} --folder {run} --steps {STEPS} {more}")


def commands(text: str) -> list[list[str]]:
    """Of the blocks of a page, or the indented lines of a docstring."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE) or [text]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    shown = [line for line in lines if re.match(r" *(python|torchrun|tesserae|touch) ", line)]
    return [shlex.split(line, comments=True) for line in shown]


def parsed(command: list[str]) -> tuple[int, int, list[str]]:
    """Nodes, ranks of each, and what the script gets; its parser takes it."""
    if command[0] == "python":
        nodes, ranks, script, given = 1, 1, command[1], command[2:]
    else:  # torchrun takes what could be the beginning of an option of its own, also behind the script
        options = get_args_parser().parse_args(command[1:])
        nodes, ranks = int(options.nnodes.partition(":")[0]), int(options.nproc_per_node)
        script, given = options.training_script, options.training_script_args
    assert ROOT / script == SCRIPT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *given])
        runpy.run_path(str(SCRIPT))["parse"]()
    return nodes, ranks, given


def of_the_page(option: str) -> str:
    """What the script gets in the command of the page that has this option, on four ranks; tests put theirs behind."""
    [command] = [words for words in commands(PAGE.read_text().split(LARGER)[0]) if option in words]
    nodes, ranks, given = parsed(command)
    assert (nodes, ranks) == (1, 4)
    return shlex.join(given)


def as_main(rank: int, world_size: int, given: list[str], terminate: tuple[int, int] | None = None) -> tuple[Any, str]:
    """The status with which the script ends on this rank, started as by torchrun, and what it prints. `terminate`: the
    rank that gets SIGTERM, and the step in which it does."""
    if terminate is not None and terminate[0] == rank:
        steps = 0

        def count(optimizer: Optimizer, *_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps == terminate[1]:
                os.kill(os.getpid(), signal.SIGTERM)

        register_optimizer_step_post_hook(count)
    output = io.StringIO()
    sys.argv = [str(SCRIPT), *given]
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as end:
            return end.code or 0, output.getvalue()
    return 0, output.getvalue()


def train(ranks: int, given: list[str], terminate: tuple[int, int] | None = None) -> str:
    """What the first rank prints. All of them end well."""
    ends = run_ranks(as_main, ranks, given, terminate, init=False)
    assert [status for status, _ in ends] == [0] * ranks
    assert not any(printed for _, printed in ends[1:])
    return ends[0][1]


def records(run: Path) -> Records:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same(ours: Records, theirs: Records, tolerance: float = FP32) -> None:
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for name in ("loss", "grad_norm", "val_loss", "perplexity"):
        one, other = ([record[name] for record in each if name in record] for each in (ours, theirs))
        assert one == pytest.approx(other, rel=tolerance), name
        assert other


# ---- one process, without Tesserae ----
def plain(rank: int, world_size: int, given: list[str], seen: int) -> tuple[Records, float]:
    """What the first `seen` steps report with transformers (and PEFT) alone, the sequences of all ranks in one batch;
    and the loss on the held-out text of the model in RUN/export, if it is there."""
    script = runpy.run_path(str(SCRIPT))
    sys.argv = [str(SCRIPT), *given]
    options = script["parse"]()
    dist.init_process_group("gloo")
    tokenizer = script["load_tokenizer"](options.model_folder)
    training, held_out = script["split"](script["load_tokens"](script["read"](options.text), tokenizer), options)
    model, _ = script["load_model"](options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    schedule = script["cosine_schedule"](optimizer, options.steps // 10, options.steps)

    @torch.no_grad()
    def evaluated(model: nn.Module) -> float:
        return sum(model(input_ids=batch, labels=batch).loss.item() for batch in held_out) / len(held_out)

    reported = []
    for step in range(1, seen + 1):
        batch = script["batch_of"](step, training, options)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, options.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        reported.append({"step": step, "loss": loss.item(), "grad_norm": norm.item()})
        if step % options.evaluate_every == 0:
            value = evaluated(model)
            reported[-1] |= {"val_loss": value, "perplexity": torch.tensor(value, dtype=torch.float64).exp().item()}
    exported = options.folder / "export"
    return reported, evaluated(AutoModelForCausalLM.from_pretrained(exported)) if exported.exists() else torch.nan


def alone(given: list[str], seen: int = STEPS) -> tuple[Records, float]:
    return run_ranks(plain, 1, given, seen, init=False)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("language")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    """trained(family): the run folder of an undisturbed run on four ranks, and what it printed."""

    @functools.cache
    def run(family: str) -> tuple[Path, str]:
        run = folder / family
        return run, train(4, arguments(run, page=of_the_page(family) if family in ("qwen", "gpt-neox") else ""))

    return run


FAMILIES = {"llama": LlamaForCausalLM, "qwen": Qwen3ForCausalLM, "gpt-neox": GPTNeoXForCausalLM}


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_one_process(family: str, trained: Any) -> None:
    run, printed = trained(family)
    ours, (theirs, exported) = records(run), alone(arguments(run))
    assert_same(ours, theirs)
    assert ours[-1]["loss"] < 0.97 * ours[0]["loss"]
    assert exported == pytest.approx(ours[-1]["val_loss"], rel=FP32)
    assert printed.splitlines()[-1] and "def main(" in printed

    for place in ("model", "export"):
        assert json.loads((run / place / "config.json").read_text())["architectures"] == [FAMILIES[family].__name__]
        tokens = Tokenizer.from_file(str(run / place / "tokenizer.json"))
        assert tokens.decode(tokens.encode("def main():").ids) == "def main():"


def test_one_rank_is_four(trained: Any, tmp_path: Path) -> None:
    run, printed = trained("llama")
    assert printed.splitlines()[-1] == train(1, arguments(tmp_path, f"--model-folder {run / 'model'}")).splitlines()[-1]
    assert_same(records(tmp_path), records(run))


def test_the_dial_changes_no_loss(trained: Any, tmp_path: Path) -> None:
    run, _ = trained("llama")
    more = f"--model-folder {run / 'model'} --degree 2 --turn 8:2"
    train(4, arguments(tmp_path, more, page=of_the_page("--turn")))  # 2:1 and 5:4
    ours = records(tmp_path)
    assert [record["degrees"] for record in ours] == [[d] * 3 for d in 2 * [2] + 3 * [1] + 3 * [4] + 4 * [2]]
    assert_same(ours, records(run))


def test_a_job_that_is_told_to_end_goes_on(trained: Any, tmp_path: Path) -> None:
    undisturbed, _ = trained("llama")
    run = tmp_path / "four"
    given = arguments(run, f"--model-folder {undisturbed / 'model'} --resume")
    printed = train(4, given, terminate=(2, 5))
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5] and "def main(" not in printed
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-4", "step-5"]
    shutil.copytree(run, tmp_path / "two", ignore=shutil.ignore_patterns("dial.sock"))
    with open(run / "metrics.jsonl", "a") as file:  # as if it had been killed later, while it wrote
        file.write('{"step": 6, "loss": 0.0}\n{"step": 7, "lo')

    train(4, given)
    assert_same(records(run), records(undisturbed), tolerance=0)  # the same layout: the same bits
    train(2, arguments(tmp_path / "two", f"--model-folder {undisturbed / 'model'} --resume"))
    assert_same(records(tmp_path / "two"), records(undisturbed))


def loaded_adapters(rank: int, world_size: int, run: str, base: str) -> int:
    """How many tensors of the newest checkpoint are not those of the model that was adapted. The export agrees."""
    script = runpy.run_path(str(SCRIPT))
    sys.argv = [str(SCRIPT), "--model-folder", base, "--length", "32", "--lora"]
    begin, _ = script["load_model"](script["parse"]())
    model, _ = script["load_model"](script["parse"]())
    assert tsm.checkpoint.load(f"{run}/checkpoints", model).step == STEPS
    exported = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f"{run}/export").state_dict()
    changed = 0
    for (name, before), after in zip(begin.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(exported[name], after, rtol=0, atol=0, msg=name)
        assert "lora_" in name or torch.equal(before, after), name
        changed += not torch.equal(before, after)
    return changed


def test_lora_trains_adapters_alone(trained: Any, tmp_path: Path) -> None:
    base = trained("llama")[0] / "export"
    given = arguments(tmp_path, f"--model-folder {base} --lr 0.02 --turn 6:2", page=of_the_page("--lora"))
    printed = train(4, given)
    theirs, exported = alone(given)
    assert_same(records(tmp_path), theirs)
    assert exported == pytest.approx(records(tmp_path)[-1]["val_loss"], rel=FP32)
    assert records(tmp_path)[-1]["val_loss"] < records(tmp_path)[5]["val_loss"]

    adapters = load_file(tmp_path / "export" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 7 * 2 and all("lora_" in name for name in adapters)  # A and B of 7 layers of 2 blocks
    trainable = sum(adapter.numel() for adapter in adapters.values())
    assert f", {trainable:,} to train" in printed
    assert run_ranks(loaded_adapters, 1, str(tmp_path), str(base)) == [len(adapters)]


def test_bf16_learns(trained: Any, tmp_path: Path) -> None:
    run, _ = trained("llama")
    train(1, arguments(tmp_path, f"--model-folder {run / 'model'} --bf16"))
    for ours, theirs in zip(records(tmp_path), records(run), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
    assert load_file(tmp_path / "export" / "model.safetensors")["lm_head.weight"].dtype == torch.float32


# ---- errors ----
def failures(rank: int, world_size: int, cases: list[list[str]]) -> list[tuple[Any, str]]:
    """How the script ends in each case, in one process."""
    ends = []
    for given in cases:
        ends.append(as_main(rank, world_size, given))
        tsm.uninstall()
        dist.destroy_process_group()
    return ends


def test_errors_say_what_to_do(trained: Any, tmp_path: Path) -> None:
    run, _ = trained("llama")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("def short(): pass\n")
    for name in ("other", "bare"):
        shutil.copytree(run / "model", tmp_path / name)
    (tmp_path / "bare" / "tokenizer.json").unlink()
    larger = json.loads((run / "model" / "tokenizer.json").read_text())
    larger["added_tokens"] += [larger["added_tokens"][0] | {"id": 512, "content": "<|more|>"}]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(larger))

    model = f"--model-folder {run / 'model'}"
    cases = {
        f"{model} --text {tmp_path}/none.txt": r"none\.txt: there is no such file",
        f"{model} --text {tmp_path}/empty.txt": r"empty\.txt: there is no text in it",
        f"{model} --text {tmp_path}/short.txt": r"too short: \d+ tokens, and two batches .* are 512",
        f"--model-folder {tmp_path}/other": r"does not fit the model, it has 513 tokens and the model 512",
        f"--model-folder {tmp_path}/bare": r"has a model but no tokenizer\.json",
        f"{model} --length 65": r"--length 65: the model has 64 positions",
        f"{model} --folder {run}": r"has checkpoints: go on from there with --resume",
    }
    given = [arguments(tmp_path / "run", more) for more in cases]
    for message, (status, _) in zip(cases.values(), run_ranks(failures, 1, given, init=False)[0], strict=True):
        assert re.search(message, str(status)), (message, status)
    first, second = run_ranks(as_main, 2, arguments(tmp_path / "run", f"{model} --batch 7"), init=False)
    assert re.search(r"--batch 7: .* among 2 ranks", str(first[0])) and second == (1, "")  # one of them says it
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---- the page ----
def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands one after the other, in an empty folder; without those that the tests above have run."""
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    here, larger = page.split(LARGER)
    run, long = tmp_path / "runs/language", [*shlex.split(SMALL), "--steps", "2000"]
    background: list[threading.Thread] = []
    printed: list[str] = []
    seen: list[str] = []

    for command in commands(here):
        if command[0] == "tesserae":
            wait_for(lambda: (run / "dial.sock").exists() and "val_loss" in (run / "metrics.jsonl").read_text())
            turned = subprocess.run([PROGRAM, *command[1:]], capture_output=True, text=True, timeout=60)
            assert turned.returncode == 0 and "P=1 G=1 O=1" in turned.stdout, turned
            seen.append("dial")
        elif command[0] == "touch":
            subprocess.run(command, check=True)
            background.pop().join()
            assert len(printed) == 1 and "def main(" not in printed[0]
            seen.append("stop")
        elif command[0] == "python":  # without a launcher, on all of the standard library
            _, _, given = parsed(command)
            given = [*given, *shlex.split(SIZE), "--steps", "4"]
            done = subprocess.run([sys.executable, SCRIPT, *given], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0 and "def main(" in done.stdout, done
            seen.append("alone")
        elif "--resume" in command:
            _, ranks, given = parsed(command)
            steps = records(run)[-1]["step"] + 2
            train(ranks, [*given, *shlex.split(SMALL), "--steps", str(steps)])
            assert [record["step"] for record in records(run)] == list(range(1, steps + 1))
            seen.append("resume")
        elif "--folder" in command:
            [option] = {"--turn", "--lora", "--family"} & set(command)
            seen.append(option)
            of_the_page(option if option != "--family" else command[-1])
        else:  # what comes next on the page is for while it runs
            _, ranks, given = parsed(command)
            task = functools.partial(train, ranks, [*given, *long])
            background.append(threading.Thread(target=lambda task=task: printed.append(task())))
            background[0].start()
    assert seen == ["alone", "dial", "stop", "resume", "--turn", "--lora", "--family", "--family"]

    ours = records(run)
    turned_at = [record["degrees"] for record in ours].index([1, 1, 1])
    theirs, _ = alone(long, turned_at + 3)
    assert_same(ours[: turned_at + 3], theirs)

    [code] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        exec(compile(code, PAGE.name, "exec"), {})
    assert "def main(" in written.getvalue()

    docstring = runpy.run_path(str(SCRIPT))["__doc__"]
    assert [parsed(command)[:2] for command in commands(larger)] == [(1, 8), (2, 8)]
    assert [parsed(command)[:2] for command in commands(docstring)] == [(1, 1), (1, 4), (2, 4)]
