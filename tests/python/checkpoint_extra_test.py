"""What a checkpoint has beside tensors: `extra`, `rank_extra`, and get_extra_state() of modules."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tesserae as tsm
from checkpoint_models import phase
from ranks import run_ranks
from tesserae.checkpoint import load, save


def test_extra_state_comes_back_as_it_was(tmp_path: Path) -> None:
    values = {
        "none": None, "yes": True, "count": 2**63, "small": -(2**63), "ratio": 0.1, "inf": float("-inf"),
        "text": "\u00e9\n",
        "list": [1, [2.0, "3"], []], "tuple": (1, (2,)), "empty": {}, 7: {(1, 2): "by numbers"}, "$tensor": "no tensor",
        "milestones": collections.Counter({3: 2}), "tensor": torch.arange(6).view(2, 3).t(),
        "bf16": torch.ones((), dtype=torch.bfloat16), "conjugate": phase().conj(), "negative": phase().conj().imag,
        "a/b": {"..": torch.zeros(0)}, "a.b": {"..": torch.ones(1)}, "state": {"json": torch.ones(3)},
    }  # fmt: skip
    save(tmp_path, extra=values, step=0)
    found = load(tmp_path).extra
    assert torch.equal(found.pop("state")["json"], values.pop("state")["json"])
    for key in ("tensor", "bf16", "conjugate", "negative"):
        assert torch.equal(found[key], values[key])
        assert found.pop(key).dtype == values.pop(key).dtype
    assert [found.pop(key)[".."].tolist() for key in ("a/b", "a.b")] == [[], [1.0]]
    assert type(found["milestones"]) is collections.Counter
    assert found == {key: value for key, value in values.items() if key not in ("a/b", "a.b")}
    assert load(tmp_path / "missing") is None


class Counter(nn.Module):
    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


@pytest.mark.parametrize("lacks", ["checkpoint", "model"])
def test_extra_state_of_modules_that_is_missing(tmp_path: Path, lacks: str) -> None:
    saved, loaded = (nn.Identity(), Counter()) if lacks == "checkpoint" else (Counter(), nn.Identity())
    loaded.calls = 7
    save(tmp_path, nn.Sequential(saved), step=0)
    path = next(tmp_path.glob("step*"))
    with pytest.raises(tsm.InvalidArgument, match=f"of 1 modules of which the {lacks} has none: 0; pass strict=False"):
        load(path, nn.Sequential(loaded))
    assert load(path, nn.Sequential(loaded), strict=False) is not None
    assert loaded.calls == 7


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"a": [1, {"f": max}]}, r"extra\['a'\]\[1\]\['f'\] is a builtin_function_or_method"),
        ({"a": torch.ones(2).to_sparse()}, "extra/a is of layout torch.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "extra/a is of ComplexDouble"),
    ],
)
def test_what_can_not_be_saved_is_named(extra: object, text: str, tmp_path: Path) -> None:
    with pytest.raises(tsm.InvalidArgument, match=text):
        save(tmp_path, extra=extra, step=1)
    assert list(tmp_path.iterdir()) == []


def has_parts_of_tensors(rank: int, world_size: int, folder: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    whole = torch.ones(1, 4)  # of which rank 0 has all rows, or half of the columns
    copied = distribute_tensor(whole, mesh, [Replicate()])
    for place in (Shard(0), Shard(1)):
        cut = distribute_tensor(whole, mesh, [place])
        with pytest.raises(
            tsm.InvalidArgument, match=r"rank_extra\['ema'\]\[1\] is a DTensor of shape .1, 4.*full_ten"
        ):
            save(folder / "none", step=1, rank_extra={"ema": (copied, cut)})
        with pytest.raises(
            tsm.InvalidArgument, match=r"(failed on rank 0: .*)?extra\['a'\] is a DTensor of shape .1, 4"
        ):
            save(folder / "none", extra={"a": cut}, step=1)
    save(folder / "copied", extra=[copied], step=1, rank_extra=copied)
    found = load(folder / "copied")
    assert [*(v.tolist() for v in found.extra), found.rank_extra.tolist()] == [whole.tolist()] * 2


def test_a_part_of_a_tensor_is_no_extra_state(tmp_path: Path) -> None:
    run_ranks(has_parts_of_tensors, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["copied"]
