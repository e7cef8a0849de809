"""tsm.status: by which engine each part of a model is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tesserae import _C
from tesserae.fsdp.instance import Instance
from tesserae.fsdp.parameters import is_managed
from tesserae.fully_shard.state import ours
from tesserae.torch_compat.fsdp2 import state_of
from tesserae.torch_compat.instance import TorchFSDP
from tesserae.torch_compat.modules import own_modules, own_parameters

NOBODY = "nobody: each rank trains its own"


@dataclass(frozen=True)
class Part:
    """What one engine trains of a model."""

    engine: str
    units: list[str] = field(default_factory=list)  # paths of modules
    parameters: list[str] = field(default_factory=list)  # names
    degrees: tuple[int, int, int] | None = None  # parameters, gradients, optimizer; of tesserae's, once known


@dataclass(frozen=True)
class Status:
    """The parts of a model, by engine; str() is for people."""

    parts: dict[str, Part]

    @property
    def left_to_torch(self) -> list[str]:
        """Names of the parameters that no engine of tesserae trains."""
        return [
            name for part in self.parts.values() if not part.engine.startswith("tesserae") for name in part.parameters
        ]

    def __str__(self) -> str:
        return "\n".join(_line(part) for part in self.parts.values())


def status(model: nn.Module) -> Status:
    """By which engine each parameter of `model` is trained: tesserae's, torch's, or none. Looks only at this rank; no
    communication.

    Raises InvalidArgument for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise _C.InvalidArgument(f"[tsm.status] {model!r} is a {type(model).__name__}; pass the model")
    found = Status({})
    _walk(model, "", Part(NOBODY), _trained_here(model), found, set())
    return found


def _walk(
    module: nn.Module,
    path: str,
    around: Part,
    trained_here: set[tuple[nn.Module, str]],
    found: Status,
    seen: set[nn.Parameter],
) -> None:
    engine, degrees = _engine(module)
    part = around
    if engine is not None:
        part = found.parts.setdefault(engine, Part(engine, degrees=degrees))
        part.units.append(path.removesuffix(".") or "the model")
    for name, parameter in own_parameters(module).items():
        if parameter is not None and parameter not in seen:
            seen.add(parameter)
            is_ignored = part.degrees is not None and not (is_managed(parameter) or (module, name) in trained_here)
            trains = Part(NOBODY) if is_ignored else part
            found.parts.setdefault(trains.engine, trains).parameters.append(path + name)
    for name, child in own_modules(module).items():
        if child is not None:
            _walk(child, f"{path}{name}.", part, trained_here, found, seen)


def _trained_here(model: nn.Module) -> set[tuple[nn.Module, str]]:
    """The entries of modules that fully_shard has; FSDP's class marks its parameters."""
    states = [state for part in model.modules() if (state := ours(part)) is not None]
    return {entry for state in states for managed in state.parameters for entry in managed.entries}


def _engine(module: nn.Module) -> tuple[str | None, tuple[int, int, int] | None]:
    """What trains the parameters of a module and those below it; None: what is around it."""
    state = ours(module)
    if isinstance(module, Instance):
        return "tesserae (FullyShardedDataParallel)", _C.unit_degrees(module._unit)
    if state is not None:
        return "tesserae (fully_shard)", state.places.strategy.degrees
    if isinstance(module, TorchFSDP):
        return "torch (FullyShardedDataParallel)", None
    if state_of(module) is not None:
        return "torch (fully_shard)", None
    if isinstance(module, DistributedDataParallel):
        return "torch (DistributedDataParallel)", None
    return None, None


def _line(part: Part) -> str:
    units = "" if part.engine == NOBODY else f", {len(part.units)} unit{'s' * (len(part.units) != 1)}"
    at = f", P={part.degrees[0]} G={part.degrees[1]} O={part.degrees[2]}" if part.degrees else ""
    few = ", ".join(_few(part.parameters))
    return f"{part.engine}{units}{at}: {len(part.parameters)} parameters ({few})"


def _few(names: list[str]) -> Iterator[str]:
    yield from names[:3]
    if len(names) > 3:
        yield "..."
