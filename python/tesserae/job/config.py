"""The configuration of `tsm.init`: from a file, a dict or nothing to one frozen object.

Keys, ranges and defaults are those of tesserae/config/schema.json (docs/configuration.md); C++ checks them.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tesserae import _C

CONFIG_VARIABLE = "TESSERAE_CONFIG"
FOR_EVER = 1e8  # seconds, three years: what is longer overflows in torch and in clocks, and means the same


@dataclass(frozen=True)
class Degrees:
    """Over how many ranks each part of the training state is split: parameters | gradients | optimizer | ranks."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Preemption:
    """How a script hears that it is to end early, and with which status it ends then."""

    file: str | None
    command: str | None
    every_seconds: float
    exit_code: int


@dataclass(frozen=True)
class Monitor:
    """What is measured of every rank while the script trains."""

    enabled: bool | None  # None: where there is a run folder
    every_seconds: float
    port: int | None  # of the page
    host: str
    allow_control: bool


@dataclass(frozen=True)
class Config:
    """A checked configuration: the nine keys of SMP v2, and what is ours."""

    hybrid_shard_degree: int
    sm_activation_offloading: bool
    activation_loading_horizon: int
    fsdp_cache_flush_warnings: bool
    allow_empty_shards: bool
    tensor_parallel_degree: int
    context_parallel_degree: int
    context_parallel_method: str
    expert_parallel_degree: int
    random_seed: int
    degrees: Degrees | None
    automatic: bool  # hybrid_shard_degree is "auto": where it begins, 0, is up to the script
    schedule: tuple[tuple[int, tuple[int, int, int]], ...]  # from the edge after that step on, these degrees
    headroom: float
    planned_steps: int
    parameter_wire: str
    gradient_wire: str
    cpu_bf16_products: str
    preemption: Preemption
    monitor: Monitor
    optimizer_on_disk: bool
    memory_limit: int | None  # bytes of a host
    scratch_folder: str
    activation_size: int  # bytes; smaller ones stay
    run_folder: str | None
    connect_deadline_seconds: float
    deadline_seconds: float
    # Keys of the section `run`; where it is silent a script's own timeouts count, too.
    given: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def has_dial(self) -> bool:
        """Whether anything can turn the dial but the script itself."""
        return self.automatic or bool(self.schedule) or self.run_folder is not None

    @property
    def is_watched(self) -> bool:
        return self.run_folder is not None if self.monitor.enabled is None else self.monitor.enabled


_asked: Config | None = None
_current: Config | None = None
_chosen: dict[str, int] = {}  # degrees that the script has assigned before tsm.init


def asked() -> Config | None:
    """What `tsm.init` was given; None before it, and after `tsm.uninstall`."""
    return _asked


def current() -> Config | None:
    """The same, with the degrees as they are since the dial was turned."""
    return _current


def read(config: str | os.PathLike[str] | dict[str, Any] | None = None) -> Config:
    """The checked configuration: a JSON file's, a dict's, or that of the file in $TESSERAE_CONFIG; else what the
    estimator of a training job of SageMaker gave as modelparallel parameters; else the defaults. Degrees that the
    script has chosen count instead.

    Raises InvalidArgument (a ValueError) that names the key, and for an unknown one the nearest known key.
    """
    text = _as_json(config)
    resolved = json.loads(_C.validate_init_config(text))
    run = resolved["run"]
    fields = {name: resolved[name] for name in Config.__dataclass_fields__ if name in resolved}
    fields["degrees"] = Degrees(**resolved["degrees"]) if resolved["degrees"] is not None else None
    fields["preemption"] = Preemption(**resolved["preemption"])
    fields["monitor"] = Monitor(**resolved["monitor"])
    automatic = resolved["hybrid_shard_degree"] == "auto"
    if automatic:
        fields["hybrid_shard_degree"] = 0
    return Config(
        **fields | _chosen,
        automatic=automatic,
        schedule=tuple((entry["step"], _scheduled(entry)) for entry in resolved["dial"]["schedule"]),
        headroom=float(resolved["dial"]["headroom"]),
        planned_steps=resolved["dial"]["planned_steps"],
        parameter_wire=resolved["wire"]["parameters"],
        gradient_wire=resolved["wire"]["gradients"],
        optimizer_on_disk=resolved["offload"]["optimizer"] == "disk",
        scratch_folder=resolved["offload"]["folder"] or os.environ.get("TMPDIR") or "/var/tmp",
        activation_size=resolved["offload"]["activation_size"],
        run_folder=run["folder"],
        connect_deadline_seconds=min(float(run["connect_deadline_seconds"]), FOR_EVER),
        deadline_seconds=min(float(run["deadline_seconds"]), FOR_EVER),
        given=frozenset(json.loads(text).get("run") or ()),
    )


def choose(name: str, degree: int) -> None:
    """Before tsm.init: of this key the configuration's value does not count, as scripts of SMP v2 assign it.

    Raises InvalidArgument for what the key does not take, and afterwards for another value.
    """
    if _asked is not None and getattr(_asked, name) != degree:
        raise _C.InvalidArgument(
            f"[tsm.state] {name} is {getattr(_asked, name)} since tsm.init; assign it before, or call tsm.uninstall()"
        )
    _chosen[name] = json.loads(_C.validate_init_config(_as_json({name: degree})))[name]


def chosen(name: str) -> int | None:
    """What the script has assigned."""
    return _chosen.get(name)


def preemption(changes: dict[str, Any]) -> Preemption:
    """The section `preemption` of tsm.init, or the defaults, with these changes; checked like it."""
    section = {} if _asked is None else asdict(_asked.preemption)
    return Preemption(**json.loads(_C.validate_init_config(_as_json({"preemption": section | changes})))["preemption"])


def _scheduled(entry: dict[str, Any]) -> tuple[int, int, int]:
    degrees = entry.get("degrees")
    if degrees is not None:
        return degrees["parameters"], degrees["gradients"], degrees["optimizer"]
    return (entry["hybrid_shard_degree"],) * 3


def _as_json(config: str | os.PathLike[str] | dict[str, Any] | None) -> str:
    if config is None:
        config = os.environ.get(CONFIG_VARIABLE)
    if config is None or config == "":
        return _C.sagemaker_parameters() or "{}"
    if isinstance(config, (str, os.PathLike)):
        return _C.read_config_file(os.fspath(config))
    if not isinstance(config, dict):
        raise _C.InvalidArgument(
            f"[tsm.init] the configuration is a {type(config).__name__}; pass a path, a dict or nothing"
        )
    try:
        return json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _C.InvalidArgument(f"[tsm.init] the configuration holds what JSON cannot say: {error}") from error


def set_current(config: Config | None) -> None:
    """For tsm.init and tsm.uninstall."""
    global _asked, _current
    _asked = _current = config
    if config is None:
        _chosen.clear()


def degrees_of(config: Config) -> tuple[int, int, int] | None:
    """(parameters, gradients, optimizer) where the configuration says them; None where the script does."""
    if config.degrees is not None:
        return config.degrees.parameters, config.degrees.gradients, config.degrees.optimizer
    if config.hybrid_shard_degree > 0:
        return (config.hybrid_shard_degree,) * 3
    return None


def turn(degrees: tuple[int, int, int]) -> None:
    """The dial was turned: what is asked for, and wrapped, from now on has these degrees."""
    global _current
    if _current is None:
        return
    one = len(set(degrees)) == 1
    _current = replace(
        _current, hybrid_shard_degree=degrees[0] if one else 0, degrees=None if one else Degrees(*degrees)
    )


def turned_to() -> tuple[int, int, int] | None:
    """The degrees to which the dial was turned; None if it was not."""
    if _current is None or _asked is None or degrees_of(_current) == degrees_of(_asked):
        return None
    return degrees_of(_current)


def turn_back() -> None:
    """What is asked for is what tsm.init was given."""
    global _current
    _current = _asked


def leaves_degrees() -> bool:
    """Whether it is the script that says over how many ranks it shards."""
    return _current is None or degrees_of(_current) is None


def check_world(config: Config, world_size: int) -> None:
    """Raises InvalidArgument if the degrees do not fit that many ranks: the tensor-parallel one divides them, the
    context- and the expert-parallel one and the others what is left, the ranks that shard state."""
    wanted = (degrees_of(config), *(degrees for _, degrees in config.schedule))
    _C.check_degrees(
        world_size,
        tensor=config.tensor_parallel_degree,
        context=config.context_parallel_degree,
        expert=config.expert_parallel_degree,
        degrees=[degrees for degrees in wanted if degrees is not None],
    )
