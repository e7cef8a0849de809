"""Other people's names and files: SMP v2's functions on state dicts, PyTorch's DCP, FSDP2's DTensors."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tesserae as tsm
from checkpoint_models import Way, assert_same, loaded_plainly, make, plain_tensors, train, whole_tensors
from ranks import run_ranks
from tesserae import convert
from tesserae.checkpoint.pieces import cuts_of_block
from tesserae.run import install_alias

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

# DTensors.


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [
        ((), (), ()),
        ((7,), (3,), (4,)),
        ((4, 3), (1, 0), (2, 3)),
        ((4, 3), (1, 1), (2, 2)),
        ((2, 3, 4), (1, 0, 0), (1, 3, 4)),
        ((2, 3, 4), (0, 1, 0), (2, 2, 4)),
        ((2, 3, 4), (0, 0, 3), (2, 3, 1)),
        ((2, 3), (2, 0), (0, 3)),
    ],
)
def test_cuts_of_a_block(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    block = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].contiguous().view(-1)
    rebuilt = torch.full_like(block, -1)
    for begin, end, start in cuts_of_block(shape, offsets, sizes):
        rebuilt[start : start + end - begin] = tensor.view(-1)[begin:end]
    assert torch.equal(rebuilt, block)


def shard_with_fsdp2() -> tuple[nn.Module, torch.optim.AdamW]:
    model, _ = make(Way(0), seed=0)
    fully_shard(model.block)
    fully_shard(model, ignored_params={model.scale})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, range(2))
    return model, optimizer


def saves_fsdp2(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    model, optimizer = shard_with_fsdp2()
    tsm.checkpoint.save(folder / "ours", model, optimizer, step=2)
    state, optimizer_state = get_state_dict(model, optimizer)
    values = {"model": state, "optimizer": optimizer_state, "epoch": 4, "rates": [{"best": 0.5}]}
    torch_checkpoint.save(values, checkpoint_id=folder / "dcp")
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )  # as torchtitan does
    torch_checkpoint.save({"model": state, "optimizer": flat}, checkpoint_id=folder / "flat")

    again, fresh = shard_with_fsdp2()
    train(again, fresh, range(1))
    tsm.checkpoint.load(folder / "ours", again, fresh)
    for name, value in again.state_dict().items():
        assert torch.equal(*(v.full_tensor() if isinstance(v, DTensor) else v for v in (value, state[name]))), name
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}


def test_fsdp2_and_dcp_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_ranks(saves_fsdp2, 2, tmp_path)[0]
    ours, model, _ = loaded_plainly(tmp_path / "ours")
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole[name]), name

    assert convert._main(["from-dcp", str(tmp_path / "dcp"), str(tmp_path / "converted"), "--step", "2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'converted' / 'step-2'}\n"
    plain, model, optimizer = loaded_plainly(tmp_path / "converted")
    assert_same(plain, ours)
    assert model.calls == 2
    assert optimizer.param_groups[0]["lr"] == 0.02
    found = tsm.checkpoint.load(tmp_path / "converted" / "step-2")
    assert (found.step, found.extra["epoch"], found.extra["rates"]) == (2, 4, [{"best": 0.5}])

    tsm.checkpoint.from_dcp(tmp_path / "flat", tmp_path / "from-flat")
    plain, _, optimizer = loaded_plainly(tmp_path / "from-flat")
    assert_same(plain, ours)
    assert optimizer.param_groups[0]["lr"] == 0.02

    assert convert._main(["to-dcp", str(tmp_path / "converted"), str(tmp_path / "back")]) == 0
    with pytest.raises(tsm.InvalidArgument, match="has a checkpoint already"):
        tsm.checkpoint.to_dcp(tmp_path / "converted", tmp_path / "back")
    again, fresh = make(Way(0), seed=7)
    train(again, fresh, range(1))
    state, optimizer_state = get_state_dict(again, fresh)
    values: dict[str, Any] = {"model": state, "optimizer": optimizer_state, "epoch": 0, "rates": [{"best": 0.0}]}
    torch_checkpoint.load(values, checkpoint_id=tmp_path / "back", no_dist=True)
    assert values["epoch"] == 4
    assert values["rates"] == [{"best": 0.5}]
    assert values["optimizer"]["param_groups"][0]["lr"] == 0.02
    for name, value in values["model"].items():
        assert torch.equal(value, whole[name]), name
    for name, value in values["optimizer"]["state"].items():
        assert torch.equal(value["exp_avg"], ours[f"exp_avg/{name}"])


def test_a_bare_state_dict_of_dcp_is_a_model(tmp_path: Path) -> None:
    model, _ = make(Way(0), seed=0)
    torch_checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    tsm.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "ours")
    again, _ = make(Way(0), seed=1)
    tsm.checkpoint.load(tmp_path / "ours", again)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert convert._main(["from-dcp", str(tmp_path), str(tmp_path / "none")]) == 1


def saves_any_placement(rank: int, world_size: int, folder: Path, shape: tuple[int, int]) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    whole = torch.arange(float(math.prod(shape))).view(shape)
    places = [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Replicate()), (Shard(0), Shard(0))]
    places += [(Shard(1), Shard(0)), (Shard(1), Shard(-1))]
    tensors = {str(p): distribute_tensor(whole, mesh, p) for p in places}
    model = nn.ParameterDict({name.replace(".", ""): nn.Parameter(value) for name, value in tensors.items()})
    tsm.checkpoint.save(folder / "model", model, step=1)
    saver, loader = smp()
    saver.save({"tensors": tensors}, checkpoint_id=folder / "nested")
    moved = {str(p): distribute_tensor(torch.zeros(shape), mesh, q) for p, q in zip(places, places[1:] + places[:1])}
    loader.load({"tensors": moved}, checkpoint_id=folder / "nested")
    assert all(torch.equal(value.full_tensor(), whole) for value in moved.values())


@pytest.mark.parametrize("shape", [(5, 7), (6, 8), (60_000, 8)])
def test_dtensors_of_any_placement(shape: tuple[int, int], tmp_path: Path) -> None:
    """Even columns are one part for each rank that has other ones, not one for each row."""
    run_ranks(saves_any_placement, 4, tmp_path, shape)
    for folder, kind in (("model", "model"), ("nested", "state")):
        path = next((tmp_path / folder).iterdir())
        stored = tsm._C.Checkpoint.open(str(path))
        assert len(stored.tensors()) == 6 + (kind == "state")
        for name in stored.tensors():
            if name.startswith(kind):
                assert torch.equal(stored.read(name), torch.arange(float(math.prod(shape))).view(shape))
        if kind == "model":  # tensors that are stored in parts go out whole
            tsm.checkpoint.to_dcp(path, tmp_path / "dcp")
            values = {"model": {name.removeprefix("model/"): torch.zeros(shape) for name in stored.tensors()}}
            torch_checkpoint.load(values, checkpoint_id=tmp_path / "dcp", no_dist=True)
            for value in values["model"].values():
                assert torch.equal(value, torch.arange(float(math.prod(shape))).view(shape))
        if shape[1] % 4 == 0:
            manifest = json.loads((path / "manifest.json").read_text())
            assert max(len(tensor["parts"]) for tensor in manifest["tensors"]) == 4


# SMP v2.


def smp() -> tuple[Any, Any]:
    """What a script imports that runs under python -m tesserae.run."""
    install_alias()
    names = ("state_dict_saver", "state_dict_loader")
    saver, loader = (importlib.import_module(f"torch.sagemaker.distributed.checkpoint.{name}") for name in names)
    return saver, loader


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "total_steps": steps,
            "rates": {"best": float("inf"), "last": (1, 2)},
        }


def saves_as_smp(rank: int, world_size: int, way: Way, folder: Path) -> dict[str, Tensor]:
    saver, _ = smp()
    model, optimizer = make(way, seed=0)
    train(model, optimizer, range(1), rank)
    for step in (1, 2):
        saver.async_save(state_of(model, optimizer, step), checkpoint_id=folder, process_group=None, coordinator_rank=0)
        before = whole_tensors(model, optimizer)
        train(model, optimizer, range(step, step + 1), rank)
    assert saver.maybe_finalize_async_calls(blocking=True) == [0, 1]
    return before


def loads_as_smp(rank: int, world_size: int, way: Way, folder: Path) -> dict[str, Tensor]:
    _, loader = smp()
    model, optimizer = make(way, seed=1)
    train(model, optimizer, range(1), rank)
    state = state_of(model, optimizer, 0)
    loader.load(state, checkpoint_id=folder)
    assert state["total_steps"] == 2
    assert state["rates"] == {"best": float("inf"), "last": (1, 2)}
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
    state["missing"] = torch.zeros(1)
    with pytest.raises(tsm.InvalidArgument, match='tensor "state/missing" is missing'):
        loader.load(state, checkpoint_id=folder)
    loader.load(state, checkpoint_id=folder, check_keys_matched=False)
    return whole_tensors(model, optimizer)


@pytest.mark.parametrize("way", [Way(2), Way(4, "HYBRID_SHARD", degree=2, use_orig_params=False)], ids=str)
def test_smp_names_in_a_script(way: Way, tmp_path: Path) -> None:
    saved = run_ranks(saves_as_smp, way.ranks, way, tmp_path)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-0.1"]  # one stays
    assert_same(run_ranks(loads_as_smp, 3, Way(3), tmp_path)[0], saved)
    # Its names are those of tsm.checkpoint.
    plain, _, optimizer = loaded_plainly(tmp_path)
    assert_same(plain, saved)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)


def test_smp_names_on_a_plain_model_in_one_process(tmp_path: Path) -> None:
    saver, loader = smp()
    model, optimizer = make(Way(0), seed=0)
    train(model, optimizer, range(2))
    tsm.checkpoint.save(tmp_path / "new", model, optimizer, step=2)
    saver.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "smp")
    again, fresh = make(Way(0), seed=1)
    train(again, fresh, range(1))
    state = {"model": again.state_dict(), "optim": fresh.state_dict()}
    loader.load(state, checkpoint_id=tmp_path / "smp")
    again.load_state_dict(state["model"])
    fresh.load_state_dict(state["optim"])
    assert_same(dict(plain_tensors(again, fresh)), dict(plain_tensors(model, optimizer)))
    state = {"model": make(Way(0), seed=2)[0].state_dict()}  # tied parameters are there twice
    loader.load(state, checkpoint_id=tmp_path / "new")
    tsm.checkpoint.to_dcp(tmp_path / "new", tmp_path / "dcp")
    torch_checkpoint.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state["model"][name], value) for name, value in model.state_dict().items())


def averages(world_size: int, value: float) -> dict[str, Any]:
    """Sharded where there are ranks to shard over."""
    whole = [torch.full(shape, value) + torch.arange(float(math.prod(shape))).view(shape) for shape in ((5, 3), (1, 2))]
    if world_size > 1:
        mesh = dist.init_device_mesh("cpu", (world_size,))
        whole = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole]
    return {"ema": whole, "losses": [torch.tensor(value)] * int(value), "nested": {"ema": whole[:1]}}


def saves_lists(rank: int, world_size: int, folder: Path) -> None:
    saver, _ = smp()
    saver.save(averages(world_size, 2.0), checkpoint_id=folder)
    cut = averages(world_size, 2.0)["ema"][0]
    if world_size > 1:
        with pytest.raises(tsm.InvalidArgument, match=r"state_dict\['pair'\]\[0\] is a DTensor of shape .5, 3"):
            saver.save({"pair": (cut, 1)}, checkpoint_id=folder / "none")


def loads_lists(rank: int, world_size: int, folder: Path) -> None:
    _, loader = smp()
    state, expected = averages(world_size, 0.0), averages(world_size, 2.0)
    loader.load(state, checkpoint_id=folder)
    assert state["losses"] == expected["losses"]
    assert len(state["ema"]) == 2
    for name, found, wanted in (("ema", state, expected), ("nested ema", state["nested"], expected["nested"])):
        for one, other in zip(found["ema"], wanted["ema"], strict=True):
            assert isinstance(one, DTensor) == (world_size > 1), name
            assert torch.equal(*(v.full_tensor() if isinstance(v, DTensor) else v for v in (one, other))), name


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (2, 1), (1, 2)])
def test_smp_names_on_lists_of_sharded_tensors(writers: int, readers: int, tmp_path: Path) -> None:
    run_ranks(saves_lists, writers, tmp_path)
    run_ranks(loads_lists, readers, tmp_path)


def test_what_smp_arguments_can_not_mean_is_an_error(tmp_path: Path) -> None:
    saver, loader = smp()
    for call, arguments, text in [
        (saver.save, {"checkpoint_id": tmp_path, "planner": object()}, "planner: not supported"),
        (saver.async_save, {"checkpoint_id": "s3://bucket/x"}, "only folders"),
        (saver.save, {}, "checkpoint_id is missing"),
        (loader.load, {"checkpoint_id": tmp_path}, "there is no checkpoint in"),
    ]:
        with pytest.raises(tsm.InvalidArgument, match=text):
            call({"x": 1}, **arguments)
    torch_checkpoint.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(tsm.InvalidArgument, match="from_dcp"):
        loader.load({"a": torch.ones(1)}, checkpoint_id=tmp_path / "dcp")
