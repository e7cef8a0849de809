"""torch's name and ours, with a small class in the place of tesserae.fsdp.FullyShardedDataParallel."""

from __future__ import annotations

import copyreg
import inspect
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import tesserae as tsm
from tesserae.fsdp import install

FSDP = torch.distributed.fsdp.FullyShardedDataParallel  # as a script holds it that imported it before tsm.init


class Fake(FSDP):
    """What install needs of our class: a constructor of its own, and the static methods that it has."""

    def __init__(self, module: nn.Module, process_group: Any = None, *, post_param_init_fn: Any = None) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = module
        self.post_param_init_fn = post_param_init_fn

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> str:
        return "ours"

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: Any, optim_state_key_type: Any, model: nn.Module, **kwargs: Any
    ) -> str:
        return "ours"

    def check_is_root(self) -> str:
        return "ours"


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(install, "_ours", None)
    install.install(Fake)
    yield
    install.uninstall()


@pytest.fixture
def torch_wrapped() -> Iterator[nn.Module]:
    """A model under torch's own FSDP, in a job of one rank."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    install.uninstall()
    model = FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"))
    install.install(Fake)
    yield model
    dist.destroy_process_group()


def test_torchs_name_makes_ours() -> None:
    inner = nn.Linear(2, 2)
    model = FSDP(inner, post_param_init_fn=print)
    assert type(model) is Fake
    assert isinstance(model, FSDP)
    assert model._fsdp_wrapped_module is inner
    assert model.post_param_init_fn is print
    assert type(FSDP(module=inner)) is Fake
    assert type(torch.distributed.fsdp.FullyShardedDataParallel(inner)) is Fake


def test_a_second_install_changes_nothing() -> None:
    methods = dict(vars(FSDP))
    install.install(Fake)
    assert dict(vars(FSDP)) == methods


def test_the_constructor_shows_its_arguments() -> None:
    assert "post_param_init_fn" in inspect.signature(FSDP).parameters
    install.uninstall()
    assert "post_param_init_fn" not in inspect.signature(FSDP).parameters
    assert "auto_wrap_policy" in inspect.signature(FSDP).parameters


def test_static_methods_go_to_ours_for_a_module_that_contains_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), FSDP(nn.Linear(2, 2)))
    assert FSDP.get_state_dict_type(model) == "ours"
    assert FSDP.get_state_dict_type(module=model) == "ours"
    assert FSDP.rekey_optim_state_dict({}, None, model) == "ours"
    assert FSDP.rekey_optim_state_dict({}, None, model=model) == "ours"


def test_static_methods_go_to_torch_for_other_modules(torch_wrapped: nn.Module) -> None:
    assert type(torch_wrapped) is FSDP
    assert FSDP.fsdp_modules(torch_wrapped) == [torch_wrapped]
    with FSDP.state_dict_type(torch_wrapped, torch.distributed.fsdp.StateDictType.FULL_STATE_DICT):
        keys = set(torch_wrapped.state_dict())
    assert keys == {"weight", "bias"}
    assert FSDP.fsdp_modules(nn.Linear(2, 2)) == []


def test_methods_that_are_called_through_the_class_look_at_the_instance(torch_wrapped: nn.Module) -> None:
    ours = FSDP(nn.Linear(2, 2))
    assert FSDP.check_is_root(ours) == "ours"
    torch_wrapped(torch.ones(1, 2))
    assert FSDP.check_is_root(torch_wrapped) is True
    assert "check_is_root" in install.overridden_methods(Fake)
    assert "clip_grad_norm_" not in install.overridden_methods(Fake), "it has none of its own"
    install.uninstall()
    assert FSDP.check_is_root(ours) == "ours", "a model of ours lives on"


def test_accelerate_takes_a_model_of_ours_for_torchs(monkeypatch: pytest.MonkeyPatch, torch_wrapped: nn.Module) -> None:
    ours = FSDP(nn.Linear(2, 2))
    asking = ModuleType("accelerate.utils.fsdp_utils")  # imported after the model was wrapped
    monkeypatch.setitem(sys.modules, asking.__name__, asking)
    FSDP.get_state_dict_type(torch_wrapped)
    assert not hasattr(asking, "type"), "left alone where there is none of ours"
    FSDP.get_state_dict_type(ours)
    install.uninstall()  # a model of ours lives on
    assert asking.type(ours) is FSDP
    assert asking.type(torch_wrapped) is FSDP
    assert asking.type(ours._fsdp_wrapped_module) is nn.Linear
    assert asking.type("Made", (nn.Module,), {}).__mro__[1] is nn.Module
    assert type(ours) is Fake, "elsewhere"


def test_every_public_static_method_is_dispatched() -> None:
    static = {name for name, method in vars(FSDP).items() if isinstance(method, staticmethod)}
    public = {name for name in static if not name.startswith("_")}
    assert public == {
        "flatten_sharded_optim_state_dict", "fsdp_modules", "full_optim_state_dict", "get_state_dict_type",
        "optim_state_dict", "optim_state_dict_to_load", "rekey_optim_state_dict", "scatter_full_optim_state_dict",
        "set_state_dict_type", "shard_full_optim_state_dict", "sharded_optim_state_dict", "state_dict_type",
        "summon_full_params",
    }  # fmt: skip
    assert public <= set(install.dispatched_methods())
    assert not any(isinstance(method, classmethod) for method in vars(FSDP).values())
    for name in public:
        assert getattr(FSDP, name) is not install.original(name)
        assert inspect.signature(getattr(FSDP, name)) == inspect.signature(install.original(name))


def test_a_static_method_that_ours_does_not_have_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"\[FSDP.full_optim_state_dict\].*not available"):
        FSDP.full_optim_state_dict(FSDP(nn.Linear(2, 2)), None)


def test_after_uninstall_the_name_means_torchs(torch_wrapped: nn.Module) -> None:
    ours = FSDP(nn.Linear(2, 2))
    install.uninstall()
    assert not install.is_installed()
    theirs = FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"))
    assert type(theirs) is FSDP
    assert FSDP.fsdp_modules(theirs) == [theirs]
    assert FSDP.get_state_dict_type(ours) == "ours", "a model of ours lives on"
    install.install(Fake)
    assert type(FSDP(nn.Linear(2, 2))) is Fake


class UsersOwn(FSDP):
    pass


class UsersOwnOfOurs(Fake):
    pass


def test_a_subclass_of_torchs_class_is_refused() -> None:
    with pytest.raises(tsm.InvalidArgument, match=r"install_test.UsersOwn is a subclass of torch's"):
        UsersOwn(nn.Linear(2, 2))
    assert type(UsersOwnOfOurs(nn.Linear(2, 2))) is UsersOwnOfOurs


def test_copies_keep_their_class() -> None:
    assert type(copyreg.__newobj__(FSDP)) is FSDP  # what copy and pickle call
    assert type(copyreg.__newobj__(Fake)) is Fake
    assert pickle.loads(pickle.dumps([FSDP, Fake])) == [FSDP, Fake]
