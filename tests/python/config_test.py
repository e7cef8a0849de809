from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import tesserae as tsm
from tesserae.job import config


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(config.CONFIG_VARIABLE, raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    yield
    tsm.uninstall()


DEFAULTS = config.Config(
    hybrid_shard_degree=0,
    sm_activation_offloading=True,
    activation_loading_horizon=2,
    fsdp_cache_flush_warnings=True,
    allow_empty_shards=False,
    tensor_parallel_degree=1,
    context_parallel_degree=1,
    context_parallel_method="auto",
    expert_parallel_degree=1,
    random_seed=12345,
    degrees=None,
    automatic=False,
    schedule=(),
    headroom=0.1,
    planned_steps=0,
    parameter_wire="exact",
    gradient_wire="exact",
    cpu_bf16_products="torch",
    preemption=config.Preemption(file=None, command=None, every_seconds=5, exit_code=0),
    monitor=config.Monitor(enabled=None, every_seconds=0.5, port=None, host="127.0.0.1", allow_control=False),
    optimizer_on_disk=False,
    memory_limit=None,
    scratch_folder="/var/tmp",
    activation_size=1 << 20,
    run_folder=None,
    connect_deadline_seconds=60.0,
    deadline_seconds=300.0,
)


def test_nothing_means_the_defaults_of_smp() -> None:
    assert config.read() == config.read({}) == DEFAULTS


def test_a_dict_and_a_file_say_the_same(tmp_path: Path) -> None:
    document = {"hybrid_shard_degree": 4, "$comment": "why", "run": {"deadline_seconds": 5, "folder": "runs/a"}}
    file = tmp_path / "smp.json"
    file.write_text("// notes are skipped\n" + json.dumps(document))
    wanted = dataclasses.replace(DEFAULTS, hybrid_shard_degree=4, deadline_seconds=5.0, run_folder="runs/a")
    assert config.read(document) == config.read(file) == config.read(str(file)) == wanted


def test_raw_degrees() -> None:
    read = config.read({"degrees": {"parameters": 2, "gradients": 4, "optimizer": 8}})
    assert read.degrees == config.Degrees(2, 4, 8)
    assert config.degrees_of(read) == (2, 4, 8)
    assert config.degrees_of(config.read({"hybrid_shard_degree": 3})) == (3, 3, 3)
    assert config.degrees_of(DEFAULTS) is None


def test_without_an_argument_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "smp.json"
    file.write_text('{"random_seed": 7}')
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(file))
    assert config.read().random_seed == 7
    assert config.read({}).random_seed == 12345


def test_every_key_of_smp_is_taken_where_its_feature_is_not_asked_for() -> None:
    harmless = {
        "hybrid_shard_degree": 1,
        "sm_activation_offloading": False,
        "activation_loading_horizon": 2,
        "fsdp_cache_flush_warnings": False,
        "allow_empty_shards": True,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "random_seed": 0,
    }
    read = dataclasses.asdict(config.read(harmless))
    assert {key: read[key] for key in harmless} == harmless


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"hybrid_shard_degre": 2}, r"hybrid_shard_degre: unknown key; did you mean hybrid_shard_degree\?"),
        ({"tensor_parallel_degree": 0}, "tensor_parallel_degree"),
        ({"context_parallel_method": "ring"}, "context_parallel_method: must be one of"),
        ({"hybrid_shard_degree": -1}, "hybrid_shard_degree: must be at least 0, but is -1"),
        ({"train": {"steps": 5}}, "train: is read by `tesserae train` only"),
        ({"random_seed": {1, 2}}, r"\[tsm.init\] the configuration holds what JSON cannot say"),
        ({"run": {"deadline_seconds": float("nan")}}, r"\[tsm.init\] the configuration holds what JSON cannot say"),
        (3, r"\[tsm.init\] the configuration is a int; pass a path, a dict"),
        ("no/such/file.json", "no/such/file.json"),
    ],
)
def test_what_can_not_work_is_a_value_error_that_says_so(document: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        config.read(document)
    assert isinstance(caught.value, tsm.InvalidArgument)
    assert isinstance(caught.value, tsm.Error)


def test_a_file_that_is_no_json_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "smp.json"
    file.write_text('{\n "hybrid_shard_degree": 2,,\n}')
    with pytest.raises(tsm.InvalidArgument, match=r"smp.json:2:\d+: no valid JSON"):
        config.read(file)


def test_degrees_must_fit_the_world() -> None:
    config.check_world(config.read({"hybrid_shard_degree": 2}), 4)
    config.check_world(DEFAULTS, 7)
    with pytest.raises(tsm.InvalidArgument, match="3"):
        config.check_world(config.read({"hybrid_shard_degree": 3}), 4)
    with pytest.raises(tsm.InvalidArgument, match="8"):
        config.check_world(config.read({"hybrid_shard_degree": 8}), 4)


# What the estimator of a job of SageMaker gave: as the toolkit in its container says it, twice, and without one.
FORMS = ("SM_HP_MP_PARAMETERS", "SM_HPS", "files")


@pytest.mark.parametrize("form", FORMS)
def test_without_a_configuration_the_estimators_parameters_count(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parameters = {"hybrid_shard_degree": 4}
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    if form == "files":
        folder = tmp_path / "input" / "config"
        folder.mkdir(parents=True)
        (folder / "resourceconfig.json").write_text('{"current_host": "algo-1", "hosts": ["algo-1"]}')
        (folder / "hyperparameters.json").write_text(json.dumps({"mp_parameters": json.dumps(parameters)}))
    else:
        hyperparameters = parameters if form == FORMS[0] else {"epochs": 3, "mp_parameters": parameters}
        monkeypatch.setenv("SM_HOSTS", '["algo-1"]')
        monkeypatch.setenv(form, json.dumps(hyperparameters))
    assert config.read() == dataclasses.replace(DEFAULTS, hybrid_shard_degree=4)
    assert config.read({}) == DEFAULTS
    named = tmp_path / "named.json"
    named.write_text('{"hybrid_shard_degree": 2}')
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(named))
    assert config.read().hybrid_shard_degree == 2


def test_wrong_parameters_of_an_estimator_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"microbatches": 4}')  # of version 1 of the library
    with pytest.raises(tsm.InvalidArgument, match=r"microbatches: unknown key.*in SM_HP_MP_PARAMETERS"):
        config.read()
