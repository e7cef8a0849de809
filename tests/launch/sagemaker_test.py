"""Training jobs of SageMaker on two hosts, each a process with the variables that the training toolkit sets, and
examples/sagemaker."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launched import ROOT, TINY, Environment, expect_same_training, free_port, program, run, run_together

EXAMPLES = ROOT / "examples" / "sagemaker"
HOSTS = ["127.0.0.1", "127.0.0.2"]  # names that lead to this machine
LOSS = re.compile(r"^step +(\d+) +loss ([\d.]+)", re.MULTILINE)


def toolkit_variables(
    base: Path, host: int, hyperparameters: dict[str, Any], gpus: int = 0, hosts: list[str] = HOSTS
) -> Environment:
    """As src/sagemaker_training/environment.py of the toolkit makes them (5.1.1). SAGEMAKER_BASE_DIR is its own."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))

    values = {
        "hosts": hosts,
        "current_host": hosts[host],
        "num_gpus": gpus,
        "hps": hyperparameters,
        "framework_params": {"sagemaker_torch_distributed_enabled": True},
        "resource_config": {"current_host": hosts[host], "hosts": hosts, "network_interface_name": "eth0"},
        "channels": ["train"],
        "channel_train": str(base / "input/data/train"),
        "model_dir": str(base / f"model{host}"),  # each host has folders of its own
        "output_data_dir": str(base / f"output{host}/data"),
    } | {f"hp_{name}": value for name, value in hyperparameters.items()}
    return {f"SM_{name.upper()}": text(value) for name, value in values.items()} | {"SAGEMAKER_BASE_DIR": str(base)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """/opt/ml, with the pages of docs/ as the channel `train`."""
    data = tmp_path / "input" / "data"
    data.mkdir(parents=True)
    (data / "train").symlink_to(ROOT / "docs")
    return tmp_path


# ---- tesserae train ----
def test_two_hosts(environment: Environment, local_run: Callable[[int], Path], base: Path) -> None:
    """SM_NUM_GPUS ranks on each, which meet at the first; the degree comes from the estimator."""
    port, parameters = free_port(), {"hybrid_shard_degree": 2}
    hyperparameters = {"mp_parameters": parameters, "train.eval_batches": 4}
    jobs = []
    for host in range(2):
        variables = toolkit_variables(base, host, hyperparameters, gpus=2) | {"MASTER_PORT": port}
        jobs.append(([str(program()), "train", str(TINY)], environment | variables))
    written = run_together(jobs, base)
    assert "on 4 ranks (cpu), P=2 G=2 O=2" in written[0]
    assert written[1] == "", "one host speaks"
    expect_same_training(base / "output0" / "data" / "tiny", local_run(4), ranks=4)
    assert [(base / f"model{host}" / "model.safetensors").exists() for host in range(2)] == [True, False]


def test_one_host_goes_on_from_its_checkpoints(environment: Environment, base: Path) -> None:
    """What a spot instance leaves: /opt/ml/checkpoints, and nothing else."""
    config = base / "job.json"
    config.write_text(json.dumps(json.loads(TINY.read_text()) | {"data": {"path": "channel:train"}}))
    words = (
        str(program()),
        "train",
        str(config),
        "--nproc",
        "2",
        "--resume",
        "auto",
        "--set",
        "data.sequence_length=64",
    )
    for attempt, steps in enumerate((3, 5)):
        hyperparameters = {"train.steps": steps, "train.eval_batches": 0}
        variables = toolkit_variables(base, 0, hyperparameters, hosts=HOSTS[:1])
        variables["SM_OUTPUT_DATA_DIR"] = str(base / f"output of instance {attempt}")
        variables["SM_MODEL_DIR"] = str(base / f"model of instance {attempt}")
        said = run(*words, environment=environment | variables)
    assert (base / "checkpoints" / "step-3").is_dir() and (base / "checkpoints" / "step-5").is_dir()
    assert "resumed at step 3" in said
    # On one instance it would be said before, not after training.
    again = subprocess.run(words, env=environment | variables, capture_output=True, text=True, timeout=60)
    assert (again.returncode, again.stdout) == (2, "")
    assert "run.weights_folder:" in again.stderr and "has weights already (model.safetensors)" in again.stderr


WRONG = {
    "host": ({"SM_CURRENT_HOST": "algo-9"}, (), "SM_CURRENT_HOST=algo-9 is none of the hosts"),
    "hosts": ({"SM_HOSTS": "algo-1"}, (), "SM_HOSTS=algo-1 is not a JSON list of names"),
    "GPUs": ({"SM_NUM_GPUS": "many"}, (), "SM_NUM_GPUS=many is not a number"),
    "hyperparameter": ({"SM_HPS": '{"epochs": 3}'}, (), "epochs: is a hyperparameter of this job"),
    "parameters": ({"SM_HP_MP_PARAMETERS": '{"partitions": 2}'}, (), "partitions: unknown key"),
    "channel": ({}, ("data.path=channel:test",), 'SM_CHANNEL_TEST is not set: the job\'s channels are ["train"]'),
    "checkpoints": ({}, ("checkpoint.every_steps=5",), "this job has 2 hosts, each with a"),
}


@pytest.mark.parametrize("changes, settings, says", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(
    environment: Environment, base: Path, changes: Environment, settings: tuple[str, ...], says: str
) -> None:
    variables = toolkit_variables(base, 0, {}) | changes
    words = [program(), "train", TINY, *(word for setting in settings for word in ("--set", setting))]
    done = subprocess.run(words, env=environment | variables, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2) and says in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1, "one line, before any rank starts"


# ---- Python scripts ----
@pytest.mark.long
def test_a_script_under_the_toolkits_torchrun(environment: Environment, base: Path) -> None:
    """examples/sagemaker/train.py, started as by torch_distributed.py of the toolkit."""
    port, jobs = free_port(), []
    hyperparameters = {"steps": 12, "mp_parameters": {"hybrid_shard_degree": 2}}
    for host in range(2):
        words = ["torchrun", "--nnodes", "2", "--nproc_per_node", "2", "--master_addr", HOSTS[0],
                 "--master_port", port, "--node_rank", str(host), str(EXAMPLES / "train.py"),
                 "--mp_parameters", "hybrid_shard_degree=2", "--steps", "12"]  # fmt: skip
        jobs.append((words, environment | toolkit_variables(base, host, hyperparameters)))
    losses = dict(LOSS.findall(run_together(jobs, base)[0]))
    assert sorted(map(int, losses)) == [1, 10, 12]
    assert float(losses["12"]) < 0.95 * float(losses["1"])
    weights = torch.load(base / "model0" / "model.pt")
    assert weights["head.weight"].shape == (256, 64)


# ---- the SDK ----
# Of sagemaker 2.257.7, whose dependencies do not go with those of the tests: what the constructors take.
ESTIMATOR = {
    "image_uri", "role", "instance_count", "instance_type", "hyperparameters", "sagemaker_session", "max_run",
    "use_spot_instances", "max_wait", "checkpoint_s3_uri", "container_entry_point", "container_arguments",
}  # fmt: skip
PYTORCH = (ESTIMATOR - {"container_entry_point", "container_arguments"}) | {"entry_point", "source_dir", "distribution"}


class Recorded:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


@pytest.fixture
def estimators(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """examples/sagemaker/estimator.py with an SDK that keeps what it gets."""
    for name, kind in (("sagemaker.estimator", "Estimator"), ("sagemaker.pytorch", "PyTorch")):
        module = types.ModuleType(name)
        setattr(module, kind, type(kind, (Recorded,), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "sagemaker", types.ModuleType("sagemaker"))
    spec = importlib.util.spec_from_file_location("estimator", EXAMPLES / "estimator.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OPTIONS = argparse.Namespace(
    role="r", image="i", local=False, instance_type="ml.p4d.24xlarge", instances=2, session=None, spot=True,
    checkpoints="s3://b/c", steps=7, job="jobs/tiny.json",
)  # fmt: skip


def test_the_estimators_are_calls_that_the_sdk_takes(estimators: types.ModuleType) -> None:
    script, program = estimators.script_estimator(OPTIONS), estimators.program_estimator(OPTIONS)
    assert set(script.arguments) <= PYTORCH and set(program.arguments) <= ESTIMATOR
    assert (EXAMPLES / script.arguments["entry_point"]).is_file()
    assert script.arguments["distribution"]["torch_distributed"] == {"enabled": True}


def test_what_the_estimators_pass_is_understood(
    estimators: types.ModuleType, environment: Environment, base: Path
) -> None:
    """The job of `program`, as its container would start it."""
    arguments = estimators.program_estimator(OPTIONS).arguments
    command, *words = arguments["container_entry_point"] + arguments["container_arguments"]
    assert command == "tesserae" and words[1] == "/opt/ml/input/data/job/tiny.json"
    words[1] = str(TINY)
    hyperparameters = {**arguments["hyperparameters"], "hybrid_shard_degree": 1}  # of one rank here
    variables = toolkit_variables(base, 0, hyperparameters, hosts=HOSTS[:1])
    said = run(program(), *words, "--dry-run", environment=environment | variables)
    resolved = json.loads(said[: said.rindex("}") + 1])
    assert resolved["train"]["steps"] == 7 and resolved["data"]["path"] == str(base / "input/data/train")
    assert resolved["checkpoint"]["folder"] == str(base / "checkpoints")
