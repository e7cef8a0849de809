"""tsm.plan and `tesserae plan --script`: what is traced of a script's model, and what is planned from it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import tesserae as tsm
from tesserae.planning.__main__ import trace_script
from tesserae.planning.batches import rows_of
from tesserae.planning.planned import Plan
from tesserae.planning.tracing import _Pass, trace

PROGRAM = Path(tsm.__file__).absolute().parents[2] / "cli/tesserae"
TOKENS = 64
LLAMA = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
BLOCK = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96  # elements of its matrices


def llama() -> nn.Module:
    return LlamaForCausalLM(LLAMA)


def ids(rows: int = 5) -> dict[str, Tensor]:
    tokens = torch.zeros(rows, TOKENS, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    return trace(llama, ids())


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Layers(nn.Module):
    """Not in a ModuleList."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.last = Layer(width), Layer(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


def mean(output: Tensor) -> Tensor:
    return output.mean()


LAYERS = (Layers, torch.zeros(3, 32))


def test_units_and_sizes_of_a_transformer(traced: dict[str, Any]) -> None:
    block = BLOCK + 2 * 64
    assert traced["units"] == [block] * 3
    assert traced["root"] == 2 * 256 * 64 + 64
    assert traced["parameters"] == traced["trained"] == 3 * block + traced["root"]
    assert (traced["name"], traced["dtype"]) == ("LlamaForCausalLM", "bf16")


@pytest.mark.parametrize("kind", ["kept", "recomputed"])
def test_products_are_those_of_a_forward_and_its_backward(kind: str, traced: dict[str, Any]) -> None:
    done = traced[kind]
    multiplications = sum(each["multiplications"] * each["calls"] for each in done["products"] if not each["batched"])
    forward = TOKENS * 3 * BLOCK
    head = TOKENS * 256 * 64
    if kind == "kept":
        assert multiplications == 3 * (forward + head)
    else:  # the last product of a block is not needed again
        assert multiplications == 4 * forward + 3 * head - TOKENS * 3 * 64 * 96
    attention = 4 * TOKENS * TOKENS * 64 // 2 * 3  # causal
    passes = 3 if kind == "kept" else 4
    assert [(each["tokens"], each["operations"]) for each in done["attention"]] == [(TOKENS, passes * attention)]


def test_rows_add_what_they_keep_and_recomputing_keeps_the_inputs_alone(traced: dict[str, Any]) -> None:
    facts = trace(llama, ids(), dtype="fp32")
    assert facts["recomputed"]["blocks"] == {"fixed": 0, "row": 3 * TOKENS * 64 * 4}
    kept = facts["kept"]
    assert kept["blocks"]["row"] > 10 * facts["recomputed"]["blocks"]["row"]
    steepest = kept["peak"][-1]["row"]
    assert steepest > kept["blocks"]["row"] + TOKENS * 256 * 4  # and the logits
    assert 0.5 * steepest <= traced["kept"]["peak"][-1]["row"] <= 0.8 * steepest  # norms compute in fp32


class Tied(nn.Module):
    """With few rows the end of the backward is the fullest moment (two gradients of the matrix), with many the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(4000, 32), nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = nn.functional.linear(self.norm(self.embed(tokens)), self.embed.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("kind", ["kept", "recomputed"])
def test_the_fullest_moment_is_that_of_the_rows_that_are_asked_for(kind: str) -> None:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    lines = trace(Tied, tokens, dtype="fp32")[kind]["peak"]
    for rows in (1, 3, 16, 500):
        whole = _Pass(Tied, rows_of(tokens, rows), rows, None, None, "fp32", kind == "recomputed")
        found = max(line["fixed"] + rows * line["row"] for line in lines)
        assert found == pytest.approx(max(whole.levels), rel=0.01), (rows, lines)
    assert len(lines) > 1


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))


def test_a_model_that_normalises_over_its_batch() -> None:
    facts = trace(Normalised, torch.zeros(4, 32), loss=mean, dtype="fp32")
    sizes = {each["multiplications"]: each["calls"] for each in facts["kept"]["products"]}
    assert sizes == {32 * 64: 2, 64 * 8: 3}  # of one row


def test_nothing_depends_on_the_rows_of_the_batch_that_is_given() -> None:
    one, many = (trace(Layers, torch.zeros(rows, 32), loss=mean) for rows in (1, 9))
    assert {**one, "process": 0} == {**many, "process": 0}


def test_a_model_without_a_module_list_is_one_unit_unless_classes_are_named() -> None:
    facts = trace(*LAYERS, loss=mean, dtype="fp32")
    assert facts["units"] == []
    assert facts["root"] == facts["parameters"]
    assert facts["kept"]["blocks"] == {"fixed": 0, "row": 0}
    layer = 32 * 128 * 2 + 128 + 32
    for kind in (Layer, "Layer"):
        facts = trace(*LAYERS, loss=mean, units=[kind])
        assert (facts["units"], facts["root"]) == ([layer, layer], 33)


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    def model() -> nn.Module:
        made = Layers()
        made.first.requires_grad_(False)
        return made

    frozen, whole = (tsm.plan(m, LAYERS[1], loss=mean, devices=4, step_batch=8) for m in (model, Layers))
    share = frozen.facts["trained"] / frozen.facts["parameters"]
    assert 0.4 < share < 0.6
    for name in ("optimizer_state", "gradients", "masters"):
        one, other = (
            next(each["memory_of_rank"][name] for each in plan.layouts if each["optimizer"] == 4)
            for plan in (frozen, whole)
        )
        assert one == pytest.approx(other * (1 if name == "masters" else share))


def test_adapters_alone_are_reduced() -> None:
    def model() -> nn.Module:
        made = Layers()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_("bias" in name)
        return made

    adapters, whole = (tsm.plan(m, LAYERS[1], loss=mean, devices=4, step_batch=8) for m in (model, Layers))
    one, other = (next(e for e in plan.layouts if e["gradients"] == 4)["memory_of_rank"] for plan in (adapters, whole))
    assert 0 < one["reductions"] < 0.1 * other["reductions"]
    assert one["gathered"] == other["gathered"]


def test_a_plan_has_the_table_of_the_program(traced: dict[str, Any]) -> None:
    plan = Plan(traced, ["--devices", "8", "--machine", "h100", "--batch", "64", "--keep-activations"])
    assert plan.fits
    assert plan.layouts[0]["tensor"] == plan.layouts[0]["context"] == 1
    assert "LlamaForCausalLM, traced in bf16, in 4 units" in str(plan)
    assert "64 rows of the script's batch" in str(plan)
    assert repr(plan).startswith("Plan(")
    assert not Plan(traced, ["--devices", "8", "--memory", "1MB"]).fits


def test_a_model_may_be_converted_where_it_is_made() -> None:
    def converted() -> nn.Module:
        with torch.device("meta"):
            made = Layers()
        made.second.up.weight = made.first.up.weight
        return made.to_empty(device="cpu").half()

    apply = nn.Module._apply
    facts = trace(converted, LAYERS[1], loss=mean, dtype="fp32")
    assert facts["parameters"] == 2 * (32 * 128 * 2 + 128 + 32) + 33 - 32 * 128  # tied still
    assert nn.Module._apply is apply


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() if x.sum() > 0 else self.layer(-x).sum()


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: tsm.plan(Layers, {}), "has no tensor whose first dimension are rows"),
        (lambda: tsm.plan(lambda: None, LAYERS[1]), "model_fn.. returned a NoneType"),
        (lambda: tsm.plan(lambda: nn.ReLU(), torch.zeros(2, 4)), "ReLU has no parameter that is trained"),
        (lambda: tsm.plan(*LAYERS), "without a loss: give `loss`"),
        (lambda: tsm.plan(*LAYERS, loss=mean, units=["Block"]), "has no module of class Block"),
        (lambda: tsm.plan(*LAYERS, dtype="fp8"), "known are fp32, bf16, fp16"),
        (lambda: tsm.plan(*LAYERS, loss=mean, wheels=4), "wheels"),
        (lambda: tsm.plan(*LAYERS, loss=mean, wheels=False), "wheels"),
        (lambda: tsm.plan(*LAYERS, loss=mean, json=True), "--json is no option here"),
        (lambda: tsm.plan(*LAYERS, loss=mean, help=True), "--help is no option here"),
        (lambda: tsm.plan(*LAYERS, loss=mean, memory=0), "--memory: must be a positive number, but is 0"),
        (lambda: tsm.plan(*LAYERS, loss=mean, memory=-5e9), "--memory: must be a positive number, but is -5000000000"),
        (lambda: tsm.plan(*LAYERS, loss=mean, tflops=math.nan), "--tflops: must be a positive number, but is nan"),
        (lambda: tsm.plan(*LAYERS, loss=mean, devices=4.5), "devices.*4.5"),
        (lambda: tsm.plan(*LAYERS, loss=mean, layers=3), "--layers changes nothing of a traced model: leave it out"),
        (lambda: tsm.plan(*LAYERS, loss=mean, sequence=64), "--sequence changes nothing of a traced model"),
        (lambda: tsm.plan(*LAYERS, loss=mean, step_batch=4, micro_batch=8), "micro-batch of 8 is more than the whole"),
        (lambda: tsm.plan(*LAYERS, loss=mean, devices=7, step_batch=64), "the nearest that can"),
        (lambda: tsm.plan(*LAYERS, loss=mean, devices=4, context=2), "cannot be cut by the plan"),
        (lambda: tsm.plan(Branches, torch.zeros(2, 4)), r"looks at values of tensors.*plan_test.py:\d+"),
    ],
)
def test_what_cannot_be_planned_is_said(call: Any, what: str) -> None:
    with pytest.raises(tsm.InvalidArgument, match=what):
        call()


def test_none_is_not_given_and_whole_floats_are_integers() -> None:
    plan = tsm.plan(*LAYERS, loss=mean, devices=4, step_batch=8, memory=40e9)
    same = {"devices": 4.0, "step_batch": 8.0, "memory": "40GB", "machine": None, "tied": None, "json": None}
    other = tsm.plan(*LAYERS, loss=mean, keep_gathered=False, **same)
    assert plan.layouts == other.layouts
    assert "4 devices" in str(other) and "40 GB" in str(other)


def test_a_model_that_is_there_already_is_refused() -> None:
    model = Layers()
    with pytest.raises(tsm.InvalidArgument, match="make it in the call"):
        tsm.plan(lambda: model, LAYERS[1], loss=mean)


SCRIPT = """
import torch
from torch import nn
print("a script may print")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

def model_fn():
    return Net()

def batch():
    return torch.zeros(4, 64)

def loss(output):
    return output.square().mean()
"""


def run_plan(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TESSERAE_PYTHON": sys.executable}
    return subprocess.run([PROGRAM, "plan", *words], capture_output=True, text=True, env=environment, timeout=600)


def test_the_program_traces_a_script(tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text(SCRIPT)
    done = run_plan("--script", str(script), "--dtype", "fp32", "--devices", "2", "--batch", "16", "--json", "--all")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert planned["model"]["parameters"] == 3 * (64 * 64 + 64)
    assert planned["model"]["units"] == [64 * 64 + 64] * 3
    assert "a script may print" in done.stderr
    assert "net.py: a step of 1 row" in done.stderr

    # What was traced can be kept, and gives the same plan.
    names: dict[str, Any] = {}
    exec(SCRIPT, names)
    plan = tsm.plan(names["model_fn"], names["batch"](), loss=names["loss"], dtype="fp32", devices=2, step_batch=16)
    assert plan.layouts == planned["layouts"]
    facts = tmp_path / "net.json"
    facts.write_text(json.dumps(plan.facts))
    again = run_plan("--traced", str(facts), "--devices", "2", "--batch", "16", "--json")
    assert json.loads(again.stdout)["layouts"] == planned["layouts"]
    other = run_plan("--traced", str(facts), "--dtype", "bf16")
    assert (other.returncode, "was traced in fp32" in other.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = 1\n", "defines no model_fn and no batch"),
        ("def model_fn():\n    return 5\nbatch = 1\n", "has no tensor whose first dimension"),
    ],
)
def test_what_a_script_must_define(text: str, what: str, tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text(text)
    with pytest.raises(tsm.InvalidArgument, match=what):
        trace_script(script, "fp32", None)


def test_a_script_that_cannot_be_traced_is_an_error_of_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text("def model_fn(:\n")
    done = run_plan("--script", str(script))
    assert (done.returncode, done.stdout) == (2, "")
    assert "SyntaxError" in done.stderr and "could not be traced" in done.stderr
