"""Models that are made on the meta device and get their values while FSDP wraps them, module by module.

    with torch.device("meta"):                     # or accelerate.init_empty_weights()
        model = LlamaForCausalLM(config)
    delayed = DelayedParamIniter(model)
    with delayed.validate_params_and_buffers_inited():
        model = FSDP(model, ..., param_init_fn=delayed.get_param_init_fn(),
                     post_param_init_fn=delayed.get_post_param_init_fn())

So no rank ever holds the whole model. The interface is that of SMP v2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from tesserae.job.device import default_device
from tesserae.smp.module_utils import empty_module_params, move_buffers_to_device
from tesserae.smp.small import get_logger
from tesserae.tensor_parallel.parts import cuts, whole_parameters
from tesserae.torch_compat.modules import own_parameters, reset_of

Init = Callable[[nn.Module], object]


class DelayedParamIniter:
    """Initialises a model's parameters one module at a time, and counts them.

    `init_method_using_config(module)` gives the parameters and buffers of that one module (not of its submodules) their
    place and values; module_utils helps with the place. Of layers that tsm.transform has split it sees whole
    parameters, and the part is kept. None: a Hugging Face model initialises itself (`_init_weights`
    of the nearest model around the module), any other module by its `reset_parameters`. These are asked children first,
    for modules without parameters too, since some (T5's attention) set what their children hold.

    Values come from this rank's random generator: seed all ranks alike, or pass sync_module_states=True (ranks of one
    tensor-parallel group are always seeded alike). Layers that tsm.transform has split are initialised whole, one at a
    time, and cut: the numbers do not depend on the tensor-parallel degree.
    """

    def __init__(self, model: nn.Module, init_method_using_config: Init | None = None, verbose: bool = False) -> None:
        self.model = model
        self.verbose = verbose
        self.num_params_inited = 0
        self._method = init_method_using_config
        self._counted: set[int] = set()  # parameters as they were on the meta device, by id
        self._kept: list[nn.Parameter] = []  # so that no id is used again
        self._initialisers: dict[int, Init] = {}  # by id of the module
        self._around: dict[int, tuple[nn.Module, ...]] = {}  # the modules around one, innermost first, by its id
        self._awaited: Counter[int] = Counter()  # how many modules inside one wait for values, by its id
        self._shapes: dict[int, torch.Size] = {}
        self._made: dict[int, nn.Parameter | None] = {}  # by id of what was on the meta device
        self._survey(model, None, ())

    def get_param_init_fn(self) -> Init:
        """For FSDP's param_init_fn, which calls it for each module that has something on the meta device."""

        def init(module: nn.Module) -> None:
            self.count_num_params(module)
            with torch.no_grad():
                if self._method is None:
                    self._init_like_the_model(module)
                    return
                before = dict(own_parameters(module))
                with whole_parameters(module, keep=False):
                    self._method(module)
                self._tie(module, before)

        return cuts(init)

    def get_post_param_init_fn(self) -> Init:
        """For FSDP's post_param_init_fn: ties weights again where the module knows how (`tie_weights`)."""

        def tie(module: nn.Module) -> None:
            if callable(getattr(module, "tie_weights", None)):
                module.tie_weights()

        return tie

    def count_num_params(self, module: nn.Module, *args: nn.Parameter) -> None:
        """Counts the module's own parameters, and `args`, as initialised: each one once, however often it is tied."""
        for parameter in (*module.parameters(recurse=False), *args):
            if id(parameter) not in self._counted:
                self._counted.add(id(parameter))
                self._kept.append(parameter)
                self.num_params_inited += parameter.numel()
        if self.verbose:
            get_logger().info("%s: %d parameters so far", type(module).__name__, self.num_params_inited)

    @contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Generator[None]:
        """Checks, when the block ends without an error, that it has initialised everything that was on the meta device.

        Raises AssertionError naming what is left.
        """
        wanted = sum(p.numel() for p in self.model.parameters() if p.is_meta)
        before = self.num_params_inited
        yield
        if not enabled:
            return
        left = [name for name, tensor in _named_tensors(self.model) if tensor.is_meta]
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise AssertionError(f"[DelayedParamIniter] still on the meta device: {shown}")
        inited = self.num_params_inited - before
        if inited != wanted:
            raise AssertionError(
                f"[DelayedParamIniter] {inited} parameters were initialised, but {wanted} were on the meta device; "
                "pass get_param_init_fn() as FSDP's param_init_fn"
            )

    def _survey(self, module: nn.Module, model_init: Init | None, around: tuple[nn.Module, ...]) -> None:
        """Who initialises what. A model inside a model (a vision tower) initialises its own modules."""
        own = getattr(module, "_init_weights", None)
        model_init = own if callable(own) else model_init
        reset = reset_of(module)
        if model_init is not None:
            self._initialisers[id(module)] = model_init
        elif reset is not None:
            self._initialisers[id(module)] = lambda _: reset()
        self._around[id(module)] = around
        if _own_meta_tensors(module):
            self._awaited.update(id(outer) for outer in around)
        for child in module.children():
            self._survey(child, model_init, (module, *around))

    def _init_like_the_model(self, module: nn.Module) -> None:
        initialise = self._initialisers.get(id(module))
        if initialise is None and not _own_meta_tensors(module):
            return  # FSDP asks of containers, too
        if initialise is None:
            raise TypeError(
                f"[DelayedParamIniter] how to initialise a {type(module).__name__} is not known: it has no "
                "reset_parameters(), and no Hugging Face model is around it; pass init_method_using_config"
            )
        device = default_device()
        before = dict(own_parameters(module))
        empty_module_params(module, device)
        move_buffers_to_device(module, device)
        self._shapes.update((id(p), p.shape) for p in module.parameters(recurse=False))
        with whole_parameters(module, keep=False):
            initialise(module)
        self._tie(module, before)
        self._shapes.update((id(p), p.shape) for p in module.parameters(recurse=False))
        for outer in self._around[id(module)]:
            self._awaited[id(outer)] -= 1
            if self._awaited[id(outer)] == 0 and id(outer) in self._initialisers and self._is_whole(outer):
                with ExitStack() as whole:  # some initialise what their children hold
                    for each in (outer, *outer.children()):
                        whole.enter_context(whole_parameters(each, keep=True))
                    self._initialisers[id(outer)](outer)

    def _tie(self, module: nn.Module, before: dict[str, nn.Parameter | None]) -> None:
        """What was tied on the meta device is tied here."""
        own = own_parameters(module)
        for name, old in before.items():
            now = own.get(name)
            if old is not None and now is not None and not now.is_meta:
                self._kept.append(old)
                own[name] = self._made.setdefault(id(old), now)

    def _is_whole(self, module: nn.Module) -> bool:
        """Nothing in it is sharded already, as part of a unit further in."""
        return all(self._shapes.get(id(p)) == p.shape for p in module.parameters())


def _own_meta_tensors(module: nn.Module) -> bool:
    return any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _named_tensors(module: nn.Module) -> Generator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
