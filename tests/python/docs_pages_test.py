"""The pages for users: their blocks run and print what stands there; their drawings are what their script draws.

start.md, choosing.md, multi-node.md, compile.md, lora.md, export.md, how-it-works.md, troubleshooting.md, and
from-fsdp1.md, from-fsdp2.md, from-deepspeed.md, from-smp.md, from-megatron.md. Blocks are taken from the pages, never
copied.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch._dynamo.utils import counters  # here: so that the ranks, which are forked, need not import it
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tesserae as tsm
from library_runs import make_model
from ranks import run_ranks
from tesserae import _C

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PROGRAM = Path(_C.__file__).absolute().parents[2] / "cli" / "tesserae"
MIGRATIONS = ["from-fsdp1.md", "from-fsdp2.md", "from-deepspeed.md", "from-smp.md", "from-megatron.md"]
DEADLINE = 300.0


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found, page
    return found


def commands(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def run(words: list[str], folder: Path) -> str:
    """A command of a page: our program, or Python."""
    program = {"tesserae": str(PROGRAM), "python": sys.executable}[words[0]]
    done = subprocess.run([program, *words[1:]], cwd=folder, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


# ---- start.md ----
def printed_by(rank: int, world_size: int, code: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "first.py", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def test_the_first_script() -> None:
    code = blocks("start.md", "python")[0]
    plain = "".join(line for line in code.splitlines(keepends=True) if "# line" not in line)
    assert code.count("# line") == 2
    ours, theirs = (run_ranks(printed_by, 4, text, init=False)[0] for text in (code, plain))
    page = next(text for text in blocks("start.md", "text") if text.startswith("step "))
    losses = [[float(value) for value in re.findall(r"loss (\S+)", text)] for text in (ours, theirs, page)]
    assert len(losses[0]) == 5
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-3)
    assert losses[0] == pytest.approx(losses[2], rel=1e-2, abs=2e-3)


def test_the_first_command(folder: Path) -> None:
    words = next(words for block in blocks("start.md", "sh") for words in commands(block) if words[1] == "train")
    printed = run(words, folder)
    page = next(text for text in blocks("start.md", "text") if "parameters in" in text)
    assert printed.splitlines()[0] == page.splitlines()[0]  # what is trained, and how
    assert {path.name for path in (folder / "runs" / "tiny").iterdir()} >= {
        "metrics.jsonl",
        "config.json",
        "summary.json",
    }
    assert re.findall(r"^step (\d+)", printed, re.MULTILINE) == re.findall(r"^step (\d+)", page, re.MULTILINE)


# ---- choosing.md ----
def test_plans_are_what_the_plan_prints(folder: Path) -> None:
    page = blocks("choosing.md", "sh")
    plans = [words for block in page for words in commands(block) if words[1] == "plan"]
    shown = [text for text in blocks("choosing.md", "text") if text.startswith("model ")]
    assert len(plans) == len(shown) == 2
    for words, text in zip(plans, shown):
        assert run(words, folder).strip("\n") == text.strip("\n"), words


# ---- the pages on migration ----
def configurations(page: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Those of tsm.init in the page's tables, each with its row."""
    for row in re.findall(r"^\|.*\|$", (DOCS / page).read_text(), re.MULTILINE):
        for span in re.findall(r"`(?:tsm\.init\()?(\{.*?\})\)?`", row):
            with contextlib.suppress(ValueError):
                yield json.loads(span), row


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


def loss_under(config: dict[str, Any], face: str) -> float:
    tsm.init(config)
    try:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(16, 1))
        if face == "fully_shard":
            for block in list(model.children())[:2]:
                fully_shard(block)
            fully_shard(model)
        else:
            policy = ModuleWrapPolicy({Block})
            model = FullyShardedDataParallel(
                model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()
    finally:
        tsm.uninstall()


def trains_the_same(rank: int, world_size: int, cases: list[tuple[dict[str, Any], str]]) -> None:
    for face in ("FSDP", "fully_shard"):
        expected = loss_under({"hybrid_shard_degree": 4}, face)
        for config, row in cases:
            if face == "fully_shard" and "not under `fully_shard`" in row:
                with pytest.raises(tsm.InvalidArgument, match="do not hold rows in their order"):
                    loss_under(config, face)
            else:
                assert loss_under(config, face) == pytest.approx(expected, rel=1e-5), (config, face)


def test_configurations_of_the_tables_train_the_same() -> None:
    cases = [case for page in MIGRATIONS for case in configurations(page)]
    assert len(cases) >= 10
    run_ranks(trains_the_same, 4, cases)


def test_keys_exist() -> None:
    keys = set(re.findall(r"^\| `([\w.]+)` \|", (DOCS / "configuration.md").read_text(), re.MULTILINE))
    sections = {key.split(".")[0] for key in keys if "." in key}
    pages = [*MIGRATIONS, "start.md", "choosing.md", "multi-node.md", "troubleshooting.md", "export.md", "compile.md"]
    named = [
        (page, span)
        for page in pages
        for span in re.findall(r"`([a-z_]+\.[a-z_]+)`", (DOCS / page).read_text())
        if span.split(".")[0] in sections
    ]
    # What belongs to others' configurations and modules: those stand in the left column.
    theirs = {"activation_checkpointing.cpu_checkpointing", "checkpoint.utils", "optimizer.step", "model.safetensors"}
    assert len(named) > 60
    assert not [(page, span) for page, span in named if span not in keys | theirs]


def test_megatrons_flags_as_a_configuration(folder: Path) -> None:
    (folder / "job.json").write_text(blocks("from-megatron.md", "json")[0])
    printed = run(["tesserae", "train", "job.json", "--nproc", "4"], folder)
    assert "layers split over 2, P=1 G=1 O=2" in printed
    assert "512 tokens a step" in printed  # a global batch of 8


# ---- compile.md ----
def compile_with(backend: str) -> None:
    nn.Module.compile = functools.partialmethod(nn.Module.compile, backend=backend)  # type: ignore[method-assign]


def as_on_the_page(code: str, model: nn.Module, blocks: list[nn.Module], **options: Any) -> None:
    page: dict[str, Any] = {"fully_shard": functools.partial(fully_shard, **options)}
    exec(code, page)
    page["compile_and_shard"](model, blocks)


def around_checkpoints(code: str, model: nn.Module, blocks: list[nn.Module], **options: Any) -> None:
    for index, block in enumerate(blocks):
        block.compile()
        model[index] = fully_shard(checkpoint_wrapper(block))  # type: ignore[operator]
    fully_shard(model)


def after_sharding(code: str, model: nn.Module, blocks: list[nn.Module], **options: Any) -> None:
    for block in blocks:
        fully_shard(block)
        block.compile()
    fully_shard(model)


def uncompiled(code: str, model: nn.Module, blocks: list[nn.Module], **options: Any) -> None:
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def compiled(rank: int, world_size: int, code: str, backend: str) -> None:
    def losses(shard: Callable[..., None], **options: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(16, 1))
        shard(code, model, list(model.children())[:3], **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.Generator().manual_seed(1 + rank)
        found = []
        for step in range(4):
            if step == 2:
                graphs = counters["stats"]["unique_graphs"]
                tsm.reshard(model, optimizer, hybrid_shard_degree=1)
            loss = (model(torch.randn(8, 16, generator=data)).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert counters["stats"]["unique_graphs"] == graphs  # the dial compiles nothing anew
        assert (graphs > 0) == (shard is not uncompiled)
        assert not counters["graph_break"]
        torch._dynamo.reset()
        counters.clear()
        return found

    tsm.init({"hybrid_shard_degree": 2})
    compile_with(backend)
    expected = losses(uncompiled)
    assert losses(as_on_the_page) == pytest.approx(expected, rel=1e-5)
    if backend == "inductor":
        for shard in (around_checkpoints, after_sharding):
            assert losses(shard) == pytest.approx(expected, rel=1e-5)
        bf16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
        assert losses(as_on_the_page, **bf16) == pytest.approx(losses(uncompiled, **bf16), rel=2e-2)


# The compiler's time is spent in the long test: there with code that it makes, in every form.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_blocks_train_the_same(backend: str) -> None:
    run_ranks(compiled, 2, blocks("compile.md", "python")[0], backend, deadline=DEADLINE)


def compiled_split_layers(rank: int, world_size: int) -> None:
    def loss(compile: bool) -> float:
        model = tsm.transform(make_model("llama"))
        for layer in model.model.layers:
            if compile:
                layer.compile()
        blocks_of = ModuleWrapPolicy({type(model.model.layers[0])})
        model = FullyShardedDataParallel(model, auto_wrap_policy=blocks_of, use_orig_params=True)
        tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
        found = model(input_ids=tokens, labels=tokens).loss
        found.backward()
        return found.item()

    tsm.init({"tensor_parallel_degree": 2})
    compile_with("aot_eager")
    expected = loss(False)
    with pytest.warns(UserWarning, match="does not know how to trace"):
        assert loss(True) == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"] > 0
    assert all("column_linear" in why or "row_linear" in why for why in counters["graph_break"])


@pytest.mark.long
def test_split_layers_compile_with_breaks() -> None:
    run_ranks(compiled_split_layers, 2, deadline=DEADLINE)


# ---- lora.md ----
def adapts(rank: int, world_size: int, code: str, folder: Path) -> None:
    tsm.init({"hybrid_shard_degree": 2})
    names = (dist, fully_shard, get_peft_model, LoraConfig, torch, get_model_state_dict, StateDictOptions)
    page: dict[str, Any] = {name.__name__.rpartition(".")[2]: name for name in names} | {"dist": dist}
    exec(code, page)
    model, optimizer = page["shard_adapted"](make_model("llama"))
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    page["save_adapters"](model, folder)
    dist.barrier()
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        loaded = PeftModel.from_pretrained(make_model("llama"), folder).eval()
        torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_adapters(tmp_path: Path) -> None:
    run_ranks(adapts, 2, blocks("lora.md", "python")[0], tmp_path)


# ---- export.md ----
def exports(rank: int, world_size: int, code: str, folder: Path, face: str) -> None:
    tsm.init({"hybrid_shard_degree": 2})
    page: dict[str, Any] = {
        "StateDictOptions": StateDictOptions,
        "dist": dist,
        "get_model_state_dict": get_model_state_dict,
        "save_file": save_file,
    }
    exec(code, page)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(16, 1))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if face == "fully_shard":
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    page["export"](model, folder)
    dist.barrier()
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("face", ["fully_shard", "FSDP"])
def test_export_from_a_script(face: str, tmp_path: Path) -> None:
    run_ranks(exports, 2, blocks("export.md", "python")[0], tmp_path, face)


def test_export_in_the_shell(folder: Path) -> None:
    for words in commands(blocks("export.md", "sh")[0]):
        run(words, folder)
    made = folder / "runs" / "export"
    weights = load_file(made / "weights" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert (made / "again" / "step-0" / "manifest.json").exists()
    whole = torch.load(made / "all.pt", weights_only=True)
    for name, value in weights.items():
        torch.testing.assert_close(whole["model"][name].bfloat16(), value, msg=name)
    assert whole["optimizer"]


# ---- multi-node.md ----
@pytest.mark.long
def test_two_nodes(folder: Path) -> None:
    """The commands for two nodes, on two emulated hosts, as the page's last block has it."""
    (block,) = (text for text in blocks("multi-node.md", "sh") if "host0:" in text)
    (example,) = commands(block)
    assert example[0] == "bench/hosts.sh"
    launcher = example[: example.index("torchrun")]
    torchrun = Path(sys.executable).parent / "torchrun"
    path = f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    nodes = [words for text in blocks("multi-node.md", "sh") for words in commands(text) if words[0] == "torchrun"]
    assert len(nodes) == 3
    for words in nodes:
        there = [word.replace("node-a:29500", "host0:29501") for word in words[1:]]
        done = subprocess.run(
            [str(ROOT / launcher[0]), *launcher[1:], str(torchrun), *there],
            cwd=folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        if done.returncode == 77:
            pytest.skip(f"bench/hosts.sh cannot run here: {done.stderr}")
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        if "doctor" in words:
            assert "4 ranks on 2 hosts met" in done.stdout
        if "train" in words:
            assert json.loads((folder / "runs" / "tiny" / "summary.json").read_text())["hosts"] == 2


# ---- troubleshooting.md ----
THEIRS = {  # messages of others: of the kernel, torch, NCCL and Gloo
    "No module named 'tesserae'",
    "No module named 'torch.sagemaker'",
    "address already in use",
    "connect ... 127.0.1.1",
    "failed to connect",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    "RendezvousConnectionError",
    "torch.distributed.elastic ... ChildFailedError",
    "exitcode: -9",
    "exitcode: -7",
    "NCCL WARN",
    "unhandled system error",
    "CUDA out of memory",
    "/dev/shm",
    "comm",
}


def test_messages_exist() -> None:
    """Whoever changes a message changes the page: each fragment of ours is in a source."""
    sources = [*(ROOT / "tesserae").rglob("*.cpp"), *(ROOT / "tesserae").rglob("*.h"), *(ROOT / "cli").glob("*.cpp")]
    sources += (ROOT / "python" / "tesserae").rglob("*.py")
    # Literals that a compiler joins are joined here too.
    text = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in sources)
    rows = re.findall(r"^\| ([^|]*) \|[^|]*\|[^|]*\|$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row) if span not in THEIRS]
    pieces = [piece.strip() for span in spans for piece in span.split("...")]
    assert len(pieces) > 35
    assert not [piece for piece in pieces if piece not in text]


# ---- the drawings ----
@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "images" / "draw.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drawings_are_what_the_script_draws(draw: ModuleType) -> None:
    shown = (DOCS / "how-it-works.md").read_text()
    for name, text in draw.drawings().items():
        assert (DOCS / "images" / name).read_text() == text, f"{name}: run docs/images/draw.py"
        assert f"(images/{name})" in shown


DEGREES = [(4, 4, 4), (2, 2, 2), (2, 4, 4), (1, 2, 4)]


def owned_chunks(rank: int, world_size: int) -> list[int]:
    """Which chunk of a buffer of 0, 1, 2, ... this rank owns under each of DEGREES."""
    chunks = []
    for degrees in DEGREES:
        tsm.init({"degrees": dict(zip(("parameters", "gradients", "optimizer"), degrees))})
        model = nn.Linear(64, 16, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(1024.0).view(16, 64))
        sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        chunks.append(int(next(sharded.parameters())[0]) * degrees[2] // 1024)
        tsm.uninstall()
    return chunks


def test_owners_are_those_of_the_engine(draw: ModuleType) -> None:
    owned = run_ranks(owned_chunks, 4)
    assert owned == [[draw.parts(rank, *degrees)[2] for degrees in DEGREES] for rank in range(4)]


def test_bytes_are_those_of_the_plan(draw: ModuleType, folder: Path) -> None:
    shape = "--parameters 1e9 --layers 200 --dimension 512 --vocabulary 1000 --batch 64 --micro-batch 1"
    words = ["tesserae", "plan", *shape.split(), "--devices", "8", "--context", "1", "--all", "--json"]
    planned = {kept: json.loads(run(words + ["--keep-gathered"] * kept, folder)) for kept in (False, True)}
    for name, p, g, o, keeps in draw.STRATEGIES:
        plan = planned[keeps]
        (layout,) = (
            each
            for each in plan["layouts"]
            if [each[key] for key in ("tensor", "parameters", "gradients", "optimizer")] == [1, p, g, o]
        )
        memory = layout["memory_of_rank"]
        held = sum(memory[key] for key in ("pieces", "masters", "optimizer_state", "gradients", "gathered"))
        # Besides, the plan counts units that are gathered for a moment: two of two hundred.
        slack = 0.0 if keeps else 0.03
        assert held / plan["model"]["parameters"] == pytest.approx(
            sum(draw.bytes_of(p, g, o, keeps).values()), rel=0.01, abs=slack + 0.01
        ), name
