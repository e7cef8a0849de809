# Made by pybind11-stubgen: `make stub`.
"""
The engine of tesserae. Everything here is private to the package; use tesserae itself.
"""

from __future__ import annotations
import collections.abc
import torch
import torch._C._distributed_c10d
import torch.distributed.distributed_c10d
import typing

__all__: list[str] = [
    "ActivationCounters",
    "Activations",
    "BadSteps",
    "Checkpoint",
    "CommError",
    "ContextParallel",
    "ContextSequence",
    "Corruption",
    "Counters",
    "Damaged",
    "Dial",
    "DialServer",
    "Disk",
    "DiskCounters",
    "Dispatch",
    "Error",
    "Fabric",
    "FlatBuffer",
    "HeldState",
    "InvalidArgument",
    "IoError",
    "Launch",
    "Loader",
    "Membership",
    "Mesh",
    "MeshFabric",
    "Mismatch",
    "Monitor",
    "Options",
    "OutOfMemory",
    "Page",
    "Parallel",
    "PeerLost",
    "Piece",
    "ReplicaReport",
    "Resharding",
    "SaveFailed",
    "Saved",
    "Saver",
    "Split",
    "SplitRandom",
    "Splits",
    "State",
    "Statistics",
    "Strategy",
    "Timeout",
    "TokenStream",
    "TokenWriter",
    "Unit",
    "Use",
    "Watch",
    "WholeMatrices",
    "abort_process_group",
    "agree",
    "alias_of",
    "all_degrees",
    "begins_as_token_file",
    "check_degrees",
    "chunk",
    "clip_gradients",
    "column_linear",
    "combine",
    "compare_replicas",
    "connect_process_group",
    "context_attention",
    "copy_paged",
    "copy_to_parallel",
    "dispatch",
    "experts_of_rank",
    "extend_gather",
    "find_documents",
    "flat_buffers",
    "flat_slices",
    "gather_from",
    "gather_sequence",
    "grouped_linear",
    "heads_of_rank",
    "in_backward",
    "is_paged",
    "keep_freed_memory",
    "list_checkpoints",
    "load_checkpoint",
    "missing_in_process_groups",
    "parameter_group",
    "part_of",
    "plan_dispatch",
    "prefetch",
    "publish_unit",
    "read_config_file",
    "reduce_from",
    "reduce_scatter_sequence",
    "replica_group",
    "reshard",
    "row_linear",
    "sagemaker_parameters",
    "save_held",
    "scatter_to",
    "set_gatherer",
    "set_scatterer",
    "shutdown_process_groups",
    "size_of_part",
    "unit_degrees",
    "unit_fabric",
    "unsplit_embedding",
    "unsplit_linear",
    "use_reusable_host_blocks",
    "validate_init_config",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
    "waits_unseen",
    "write_checkpoint",
]

class Error(RuntimeError):
    """
    Base of every error of tesserae. The text reads "[function] what happened, the values, what to do".
    """

class InvalidArgument(Error, ValueError):
    """
    The caller passed something that cannot work. Nothing was changed.
    """

class IoError(Error):
    """
    The operating system refused something: which path, and why.
    """

class Corruption(Error):
    """
    Bytes were read but are not what was written.
    """

class OutOfMemory(Error):
    """
    There is not enough memory for what was asked. Nothing was changed.
    """

class DiskCounters:
    """
    Bytes; see tesserae/offload/disk.h.
    """
    @property
    def bytes_in_memory(self) -> int:
        """
        Of that, now.
        """
    @property
    def bytes_on_disk(self) -> int:
        """
        Taken on the disk.
        """
    @property
    def bytes_read(self) -> int:
        """
        From the disk.
        """
    @property
    def bytes_written(self) -> int:
        """
        To it.
        """
    @property
    def most_bytes_in_memory(self) -> int:
        """
        At any time.
        """
    @property
    def seconds_waited(self) -> float:
        """
        In which somebody needed what was not there yet, or room.
        """

class Disk:
    """
    The scratch file of this rank, and how much of it may be in memory.
    """
    def __init__(
        self,
        *,
        folder: str,
        limit: typing.SupportsInt | typing.SupportsIndex | None,
        ranks: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        `limit`: bytes of this host, of which `ranks` have equal parts; None: three quarters of what the control group allows, if it has a limit. IoError.
        """
    def __str__(self) -> str: ...
    def after_step(self) -> bool:
        """
        True once, the first time that this process needed more than its part in a step.
        """
    def tensor(self, elements: typing.SupportsInt | typing.SupportsIndex, dtype: torch.dtype) -> torch.Tensor:
        """
        [elements], zeros. IoError where there is no room.
        """
    @property
    def counters(self) -> DiskCounters: ...
    @property
    def limit(self) -> int | None:
        """
        Bytes of this rank.
        """

class Use:
    """
    While it lives, tensors that lie on a disk are in memory.
    """
    def __enter__(self) -> typing.Any: ...
    def __exit__(self, *args) -> None: ...
    def __init__(self, tensors: collections.abc.Sequence[torch.Tensor], *, changes: bool) -> None: ...
    def end(self) -> None: ...

class ActivationCounters:
    """
    Bytes; see tesserae/offload/activations.h.
    """
    @property
    def bytes_away(self) -> int:
        """
        Of those that are away now.
        """
    @property
    def bytes_in(self) -> int:
        """
        Of storages that came back.
        """
    @property
    def bytes_out(self) -> int:
        """
        Of storages that left.
        """
    @property
    def bytes_stayed(self) -> int:
        """
        Of those that would have left, but are needed within the horizon of the end of the forward.
        """
    @property
    def most_bytes_away(self) -> int:
        """
        The most that were away at a time.
        """
    @property
    def passes(self) -> int:
        """
        Forwards whose backward has begun; several forwards before one backward are one pass.
        """
    @property
    def seconds_waited(self) -> float:
        """
        In which the thread that computes copied, or waited for what it needs.
        """

class Saved:
    """
    Stands for a tensor that was saved.
    """
    def take(self) -> torch.Tensor: ...

class Activations:
    """
    Where activations are between forward and backward; see tesserae/offload/activations.h.
    """
    def __init__(
        self,
        *,
        horizon: typing.SupportsInt | typing.SupportsIndex,
        folder: str,
        smallest: typing.SupportsInt | typing.SupportsIndex = 1048576,
    ) -> None: ...
    def put(self, tensor: torch.Tensor) -> Saved:
        """
        None: it stays.
        """
    @property
    def counters(self) -> ActivationCounters: ...
    @property
    def forecast(self) -> int:
        """
        Bytes that leave in a forward like the last that had its backward.
        """
    @property
    def inside(self) -> bool:
        """
        Whether a unit is in its forward.
        """
    @property
    def shelf(self) -> str:
        """
        Where they go; empty before anything went.
        """

class Launch:
    """
    What the launcher told this process; see tesserae/mesh/launch.h.
    """
    def __init__(self) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def port(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def served(self) -> bool:
        """
        By the launcher.
        """
    @property
    def size(self) -> int: ...

class Strategy:
    """
    Three degrees and two lifetimes; see tesserae/mesh/strategy.h.
    """

    __hash__: typing.ClassVar[None] = None
    def __eq__(self, arg0: Strategy) -> bool: ...
    def __init__(
        self,
        name: str,
        ranks: typing.SupportsInt | typing.SupportsIndex,
        *,
        hybrid_shard_degree: typing.SupportsInt | typing.SupportsIndex = 0,
        degrees: tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
        | None = None,
    ) -> None:
        """
        What a script asks for by name, and a configuration by degrees, for so many ranks. Raises InvalidArgument, naming what would be valid.
        """
    def closest_preset(self, ranks: typing.SupportsInt | typing.SupportsIndex) -> str:
        """
        The one of FSDP's names that comes closest.
        """
    @property
    def degrees(self) -> tuple[int, int, int]: ...
    @property
    def free_after_backward(self) -> bool: ...
    @property
    def free_after_forward(self) -> bool: ...

class Mesh:
    """
    The ranks of a job as a grid of axes; see tesserae/mesh/mesh.h. Axes are asked for by name: tensor, context, data, expert, expert_data, or what they are for: state, expert_state, batch, loss, job.
    """

    __hash__: typing.ClassVar[None] = None
    def __eq__(self, arg0: Mesh) -> bool: ...
    def __init__(
        self,
        ranks: typing.SupportsInt | typing.SupportsIndex,
        *,
        tensor: typing.SupportsInt | typing.SupportsIndex = 1,
        context: typing.SupportsInt | typing.SupportsIndex = 1,
        expert: typing.SupportsInt | typing.SupportsIndex = 1,
    ) -> None:
        """
        Raises InvalidArgument, naming the nearest degrees that would do, for those that do not divide.
        """
    def __repr__(self) -> str: ...
    def degree(self, axes: str) -> int:
        """
        How many ranks differ on these axes only.
        """
    def index(self, axes: str, rank: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        In [0, degree).
        """
    def members(self, axes: str, rank: typing.SupportsInt | typing.SupportsIndex) -> list[int]:
        """
        The ranks that differ from `rank` on these axes only, by index.
        """
    def writes_unsplit(self, rank: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        What no split cuts is the same on all ranks of a tensor group; one of them counts, sends or writes it.
        """
    @property
    def ranks(self) -> int: ...

class Split:
    """
    How a tensor is cut among the ranks of an axis; see tesserae/mesh/split.h.
    """

    __hash__: typing.ClassVar[None] = None
    def __eq__(self, arg0: Split) -> bool: ...
    def __init__(
        self,
        dim: typing.SupportsInt | typing.SupportsIndex = 0,
        parts: typing.SupportsInt | typing.SupportsIndex = 1,
        index: typing.SupportsInt | typing.SupportsIndex = 0,
        blocks: typing.SupportsInt | typing.SupportsIndex = 1,
        axis: str = "tensor",
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def axis(self) -> str: ...
    @property
    def blocks(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def parts(self) -> int: ...

class Splits:
    """
    How a tensor is cut along the axes of a mesh: not at all, along one, or along two, the second within the parts of the first; see tesserae/mesh/split.h.
    """

    __hash__: typing.ClassVar[None] = None
    def __eq__(self, arg0: Splits) -> bool: ...
    @typing.overload
    def __init__(self) -> None:
        """
        Whole.
        """
    @typing.overload
    def __init__(self, only: Split) -> None: ...
    @typing.overload
    def __init__(self, first: Split, second: Split) -> None: ...
    def __repr__(self) -> str: ...
    def begins(self, whole: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> bool:
        """
        Whether this part has the first element of the whole tensor.
        """
    def part_shape(self, whole: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> list[int]:
        """
        The shape of one part, padding included. Raises InvalidArgument where it cannot be cut.
        """
    def parts(self, axis: str) -> int:
        """
        In how many parts it is cut along that axis; 1 where it is not.
        """
    @property
    def whole(self) -> bool:
        """
        Whether nothing is cut.
        """

class CommError(Error):
    """
    A collective operation failed. The group is unusable afterwards: the job ends or restarts from a checkpoint.
    """

class PeerLost(CommError):
    """
    A rank of the job is gone. `ranks`: job ranks, those lost first in front.
    """

    ranks: typing.ClassVar[tuple] = tuple()

class Timeout(CommError):
    """
    A deadline passed. `silent`: job ranks without a sign of life; `absent`: those that are alive, and in no operation while others wait: they did not call it. Both are empty where it cannot be told.
    """

    absent: typing.ClassVar[tuple] = tuple()
    silent: typing.ClassVar[tuple] = tuple()

class Mismatch(CommError):
    """
    Ranks disagree on what they do. The text gives both sides.
    """

class Counters:
    """
    What has left this rank through its groups.
    """
    def bytes(self) -> int: ...

class Fabric:
    """
    The live connections of this rank in a job.
    """
    @staticmethod
    def join(
        store: torch.distributed.distributed_c10d.Store,
        rank: typing.SupportsInt | typing.SupportsIndex,
        size: typing.SupportsInt | typing.SupportsIndex,
        *,
        served: bool,
        backend: str,
        device: torch.device,
        connect_deadline: typing.SupportsFloat | typing.SupportsIndex,
        deadline: typing.SupportsFloat | typing.SupportsIndex,
        make_group: collections.abc.Callable | None = None,
    ) -> Fabric:
        """
        Collective: the ranks that share `store` meet. Deadlines in seconds. `make_group` makes a process group of torch's of these ranks in this order, with this deadline: for devices other than the CPU and CUDA.
        """
    @staticmethod
    def null(
        rank: typing.SupportsInt | typing.SupportsIndex,
        size: typing.SupportsInt | typing.SupportsIndex,
        device: torch.device,
    ) -> Fabric:
        """
        A fabric that moves nothing.
        """
    def counters(self) -> Counters: ...
    def give_up(self) -> None:
        """
        Leaves what is broken, for a process that goes on: nothing blocks in it any more, and no verb is called.
        """
    def host_ranks(self, rank: typing.SupportsInt | typing.SupportsIndex) -> list[int]:
        """
        The ranks on the host of `rank`.
        """
    def joined_rank(self, rank: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Which rank among those that joined is `rank` in the order of hosts.
        """
    def leave(self) -> None:
        """
        Says goodbye before the process ends.
        """
    def missing_ranks(self) -> list[int]:
        """
        Ranks, as they joined, for which others waited when operations failed at their deadline.
        """
    def watched_store(self, prefix: str) -> torch.distributed.distributed_c10d.Store:
        """
        A part of the store through which the ranks met, whose waits end when one is lost. None: there is none.
        """
    @property
    def hosts(self) -> int: ...
    @property
    def rank(self) -> int:
        """
        This process's rank in the order of hosts.
        """
    @property
    def size(self) -> int: ...

class MeshFabric:
    """
    The job's fabric seen through its mesh; see tesserae/comm/mesh_fabric.h. Axes as of Mesh.
    """
    def __init__(self, job: Fabric, mesh: Mesh) -> None: ...
    def over(self, axes: str) -> Fabric:
        """
        The fabric of the ranks that differ from this one on these axes only. The same each time.
        """
    @property
    def job(self) -> Fabric: ...
    @property
    def mesh(self) -> Mesh: ...

class Membership:
    """
    What our launcher and this rank tell each other; comm/membership.h.
    """
    def __init__(self) -> None:
        """
        As the environment says. IoError if the launcher is not reached.
        """
    def ask_for_ranks(self, ranks: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def is_over(self) -> bool: ...
    def meet(
        self,
        connect_deadline: typing.SupportsFloat | typing.SupportsIndex,
        deadline: typing.SupportsFloat | typing.SupportsIndex,
    ) -> Fabric:
        """
        Collective: the ranks of this epoch meet. CommError if one is lost meanwhile.
        """
    def next_epoch(
        self,
        missing: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        deadline: typing.SupportsFloat | typing.SupportsIndex,
    ) -> bool:
        """
        After a loss: waits until the launcher begins the next epoch. False: there is none.
        """
    def remember(self, key: str, value: str) -> None: ...
    def remembered(self, key: str) -> str: ...
    def wait_for_epoch(self, deadline: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        """
        The same after ask_for_ranks().
        """
    @property
    def epoch(self) -> int: ...
    @property
    def has_place(self) -> bool: ...
    @property
    def is_of_those_left(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def served(self) -> bool:
        """
        Whether the launcher is ours.
        """

class Watch:
    """
    Whether this process was asked to end; see tesserae/preemption/watch.h.
    """
    def __init__(
        self, *, file: str | None, command: str | None, every_seconds: typing.SupportsFloat | typing.SupportsIndex
    ) -> None: ...
    def agree(self, fabric: Fabric) -> str | None:
        """
        Collective: what asked a rank of the fabric to end, the same on all of them.
        """
    def notice(self) -> str | None:
        """
        What asked this process to end; None: nothing did.
        """

class Parallel:
    """
    The ranks among which the tensors of layers are split; see tesserae/tensor/parallel.h.
    """
    def __deepcopy__(self, memo: typing.Any) -> Parallel:
        """
        Raises InvalidArgument.
        """
    def __init__(self, mesh: MeshFabric) -> None:
        """
        This rank's tensor group. Collective over it.
        """
    def broadcast(self, tensor: torch.Tensor) -> None:
        """
        Collective, in place: all have what the first has; contiguous.
        """
    def require_same(self, tensors: collections.abc.Sequence[torch.Tensor]) -> None:
        """
        Raises InvalidArgument, on all ranks, unless all were given the same. Collective.
        """
    def require_same_random(self, state: torch.Tensor) -> None:
        """
        The same of the state of a generator.
        """
    def split(
        self, dim: typing.SupportsInt | typing.SupportsIndex, blocks: typing.SupportsInt | typing.SupportsIndex = 1
    ) -> Split:
        """
        This rank's part of a tensor that is cut along `dim`.
        """
    def whole_of(
        self,
        part: torch.Tensor,
        splits: Splits,
        whole: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> torch.Tensor:
        """
        Collective over the axes that cut it: the whole tensor of shape `whole`, of which each rank brings its part. No autograd.
        """
    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

class Statistics:
    """
    What an engine has done so far. Seconds and bytes, all of this rank.
    """
    @property
    def allocations(self) -> int: ...
    @property
    def departures(self) -> int: ...
    @property
    def exposed_gather(self) -> float: ...
    @property
    def exposed_reduce(self) -> float: ...
    @property
    def gathers(self) -> int: ...
    @property
    def gradients_in_place(self) -> int: ...
    @property
    def pool_misses(self) -> int: ...
    @property
    def pool_reserved_bytes(self) -> int: ...
    @property
    def prefetch_hits(self) -> int: ...
    @property
    def reductions(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def steps(self) -> int: ...

class Options:
    """
    How a unit is sharded; see tesserae/shard/options.h.
    """
    def __init__(
        self,
        *,
        strategy: Strategy,
        parameters: torch.dtype | None,
        reduce: torch.dtype | None,
        limit_all_gathers: typing.SupportsInt | typing.SupportsIndex,
        offload: bool,
        parameter_wire: str = "exact",
        gradient_wire: str = "exact",
        parallel: Parallel = None,
        by_rows: bool = False,
    ) -> None:
        """
        `parallel`: among whom the unit's parameters may be split; it must outlive them. `by_rows`: each rank has whole rows of each parameter.
        """

class Unit:
    """
    The parameters of one FSDP instance; see python/bindings/unit.h.
    """
    def __init__(
        self,
        fabric: Fabric,
        options: Options,
        names: collections.abc.Sequence[collections.abc.Sequence[str]],
        compute: collections.abc.Sequence[torch.Tensor],
        splits: collections.abc.Sequence[
            tuple[Splits, collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]
        ] = [],
        local: collections.abc.Sequence[torch.Tensor] = [],
        dims: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
    ) -> None:
        """
        `splits`: for each parameter how it is cut, and the shape of the whole; {}: all are whole. `local`: for each parameter, which then has only a shape, the rows that this rank holds. `dims`: of which dimension.
        """
    def add_gradient(self, number: typing.SupportsInt | typing.SupportsIndex, gradient: torch.Tensor) -> None:
        """
        In a backward: a gradient of the parameter of that number, which autograd has left elsewhere.
        """
    def adopt(self, inner: Unit, name: str) -> None: ...
    def boundary(self) -> bool: ...
    def cancel(self) -> None: ...
    def describe(self) -> str:
        """
        What the ranks must agree on, as lines of text.
        """
    def discard_accumulated(self) -> None: ...
    def enter(self, inputs: typing.Any) -> None: ...
    def enter_again(self) -> None: ...
    def finish(self, output: typing.Any) -> None: ...
    def finish_gather(self) -> None:
        """
        Waits for it; entries show whole parameters.
        """
    def forget_step(self) -> None:
        """
        Forgets a forward or backward that did not end.
        """
    def gather(self) -> None:
        """
        Starts to gather ahead of the forward.
        """
    def has_replaced_entries(self) -> bool:
        """
        Whether an entry is something else than its shard, and nothing computes with the unit.
        """
    def offload_activations(self, activations: Activations) -> None:
        """
        From now on it knows of the unit's forwards, and that parameters stay.
        """
    def release(self) -> None:
        """
        Frees what is gathered, unless the unit computes with it.
        """
    def require_agreement(self) -> None:
        """
        Collective: raises Mismatch unless all ranks built the same units.
        """
    def require_between_steps(self, function: str) -> None: ...
    def set_after_backward(self, call: typing.Any) -> None:
        """
        `call(numbers)` at the end of each backward that reduces the unit's gradients, with the numbers of the parameters whose gradients it has reduced; None: nothing.
        """
    def set_average_hook(self, hook: typing.Any) -> None:
        """
        hook(average) of each buffer, on the reduce lane, before it becomes a gradient.
        """
    def set_boundary(self, boundary: bool) -> None: ...
    def set_entries(
        self,
        entries: collections.abc.Sequence[tuple[typing.Any, str, typing.Any, typing.Any]],
        while_gathered: bool = False,
    ) -> None:
        """
        (module._parameters or a module, name, compute parameter, shard) for each entry to swap; `while_gathered`: also while parameters stay gathered after the forward.
        """
    def set_gradient_divisor(self, divisor: typing.SupportsFloat | typing.SupportsIndex) -> None:
        """
        What sums of gradients are divided by, instead of the number of ranks.
        """
    def set_keeps_pieces(self, keeps: bool) -> None:
        """
        True: gradients that stay on the rank do so as its shards; else whole.
        """
    def set_lifetimes(self, *, free_after_forward: bool, free_after_backward: bool) -> None: ...
    def set_master_dtype(self, dtype: torch.dtype) -> None:
        """
        Masters, gradients and optimizer state are in that dtype from the first step on.
        """
    def set_reduce_hook(self, hook: typing.Any) -> None: ...
    def set_reduces_gradients(self, reduces: bool) -> None:
        """
        False: gradients stay on the rank, whole.
        """
    def set_reduces_unused(self, reduces: bool) -> None:
        """
        True: parameters without a gradient on this rank count as zeros.
        """
    def set_rest_ranks(self, ranks: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Parameters rest over so many ranks between forward and backward; 0: over all that shard them.
        """
    def show_dtensors(
        self, parameters: collections.abc.Sequence[collections.abc.Sequence[typing.Any]], make_gradient: typing.Any
    ) -> None:
        """
        The same for DTensors; make_gradient(parameter, local) makes a gradient of the parameter's placement.
        """
    def show_parameters(
        self, parameters: collections.abc.Sequence[collections.abc.Sequence[torch.Tensor]], keep_shapes: bool = False
    ) -> None:
        """
        keep_shapes: where a rank holds whole parameters (O is 1) they have their shapes; else what is shown is flat.
        """
    def show_shards(self) -> None:
        """
        Entries show shards, unless the unit computes.
        """
    def statistics(self) -> Statistics: ...
    def watch_outputs(self, outputs: typing.Any) -> None: ...
    def zero_grad(self) -> None: ...
    @property
    def flats(self) -> list[list[int]]:
        """
        For each flat buffer, which of the constructor's parameters are in it, by slot.
        """
    @property
    def is_root(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def strategy(self) -> Strategy: ...

class FlatBuffer:
    """
    One flat buffer of a unit; what it holds between steps.
    """
    def join(self, slices: collections.abc.Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """
        A tensor for each of the user's tensors, of its size, as one tensor.
        """
    def local(self) -> torch.Tensor:
        """
        This rank's values, one dimension, padding included; the engine's own memory.
        """
    def publish(self) -> None:
        """
        Collective: new values are what the next forward sees.
        """
    def set_gradient(self, whole: torch.Tensor) -> None:
        """
        Takes what this rank holds of a whole gradient.
        """
    def set_values(self, whole: torch.Tensor) -> None:
        """
        Takes what this rank holds of a whole buffer as its new values. Then publish().
        """
    def show(self) -> None:
        """
        The user's tensors show this rank's values and gradients, whatever they were made to show before.
        """
    def split(self, local: torch.Tensor) -> list[torch.Tensor]:
        """
        The reverse of join(): views of it.
        """
    def take(self) -> None:
        """
        Takes what the user did to values and gradients of their tensors, which show local().
        """
    def whole_gradient(self) -> torch.Tensor | None:
        """
        Collective: the whole gradient, zeros where a rank has none; None if no rank has one.
        """
    def whole_values(self, local: torch.Tensor) -> torch.Tensor:
        """
        Collective: the whole buffer, from what each rank holds (any dtype).
        """
    @property
    def begins(self) -> list[int]:
        """
        For each slot its first element in the whole buffer.
        """
    @property
    def local_range(self) -> tuple[int, int]:
        """
        Which elements of the whole buffer this rank holds between steps.
        """
    @property
    def names(self) -> list[list[str]]:
        """
        For each slot all names, from the root down.
        """
    @property
    def shapes(self) -> list[list[int]]: ...
    @property
    def shard(self) -> int | None:
        """
        The number of its shard in the engine; None if it is frozen.
        """
    @property
    def total(self) -> int: ...
    @property
    def trainable(self) -> bool: ...

class Resharding:
    """
    What a change of degrees did on this rank.
    """
    @property
    def after(self) -> tuple[int, int, int]:
        """
        The degrees since.
        """
    @property
    def before(self) -> tuple[int, int, int]:
        """
        The degrees (parameters, gradients, optimizer) before it.
        """
    @property
    def bytes(self) -> int:
        """
        That this rank sent to others.
        """
    @property
    def seconds(self) -> float:
        """
        Until the model could train again.
        """

class ReplicaReport:
    """
    What a comparison of replicas found; the same on all ranks, but for `here`.
    """
    @property
    def decided(self) -> bool:
        """
        Whether some bytes had a majority wherever they differ.
        """
    @property
    def here(self) -> bool:
        """
        Whether this rank is one of them.
        """
    @property
    def suspects(self) -> list[int]:
        """
        Ranks whose bytes are not those of most; of all, where none are.
        """
    @property
    def text(self) -> str:
        """
        Which parameters, by rank.
        """

class SplitRandom:
    """
    Random numbers of split computation; tesserae/tensor/split_random.h.
    """
    def __init__(
        self, parallel: Parallel, seed: typing.SupportsInt | typing.SupportsIndex, device: torch.device
    ) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    @property
    def inside(self) -> bool: ...

class ContextParallel:
    """
    The ranks that read the same sequences and share out their positions; see tesserae/context/parallel.h.
    """
    def __init__(self, mesh: MeshFabric, method: str = "auto") -> None:
        """
        This rank's context group. Collective over it. Raises InvalidArgument for a method that cannot be.
        """
    def method_for(
        self, heads: typing.SupportsInt | typing.SupportsIndex, kv_heads: typing.SupportsInt | typing.SupportsIndex
    ) -> str:
        """
        How keys and values travel for an attention of so many heads.
        """
    def require_same(self, tokens: torch.Tensor) -> None:
        """
        Collective: raises InvalidArgument, on all ranks, unless all were given the same tokens.
        """
    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

class ContextSequence:
    """
    A sequence that is cut over the ranks of a ContextParallel, as this one sees it; see tesserae/context/sequence.h.
    """
    def __init__(
        self,
        parallel: ContextParallel,
        length: typing.SupportsInt | typing.SupportsIndex,
        *,
        causal: bool = True,
        window: typing.SupportsInt | typing.SupportsIndex = 0,
        documents: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
    ) -> None:
        """
        documents: where packed documents begin, the first at 0. Raises InvalidArgument.
        """
    def mean(
        self, sum: torch.Tensor, count: torch.Tensor | typing.SupportsFloat | typing.SupportsIndex
    ) -> torch.Tensor:
        """
        Collective, differentiable: the sum of `sum` over the ranks, divided by `count`, that of the whole batch; the same on all ranks. Gradients are as for what is averaged over the ranks.
        """
    def own(self, x: torch.Tensor, dim: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor:
        """
        Of a tensor with every position along `dim`: this rank's.
        """
    def positions(self, device: torch.device) -> torch.Tensor:
        """
        This rank's, [tokens], int64, ascending.
        """
    def whole(self, x: torch.Tensor, dim: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor:
        """
        Collective, differentiable: every position of what the ranks have. Gradients are as for what is averaged over the ranks.
        """
    @property
    def length(self) -> int:
        """
        Positions of the whole sequences.
        """
    @property
    def pairs(self) -> int:
        """
        Of a query of this rank and a key: what its attention costs.
        """
    @property
    def tokens(self) -> int:
        """
        Of this rank.
        """

class WholeMatrices:
    """
    Matrices that ranks hold by rows, brought whole to one rank each and back; see tesserae/optim/whole_matrices.h.
    """
    def __init__(
        self,
        fabric: Fabric,
        degree: typing.SupportsInt | typing.SupportsIndex,
        shapes: collections.abc.Sequence[
            tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        ],
    ) -> None:
        """
        Collective over the `degree` ranks that share rows with this one.
        """
    def collect(self, rows: collections.abc.Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """
        The matrices of this rank, in order, from the rows that all ranks bring. Collective.
        """
    def distribute(self, whole: collections.abc.Sequence[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """
        This rank's rows of all matrices, from those that the ranks own. Collective.
        """
    @property
    def imbalance(self) -> float: ...
    @property
    def owners(self) -> list[int]:
        """
        By matrix: which of these ranks gets it.
        """

class BadSteps:
    """
    Which steps are bad; see tesserae/optim/bad_steps.h.
    """
    def __init__(self, loss_spike: typing.SupportsFloat | typing.SupportsIndex | None) -> None: ...
    def judge(
        self,
        fabric: Fabric,
        loss: typing.SupportsFloat | typing.SupportsIndex,
        norm: typing.SupportsFloat | typing.SupportsIndex,
        overflow_expected: bool,
    ) -> str:
        """
        Collective.
        """
    def take_over(self, description: str) -> None: ...
    @property
    def description(self) -> str: ...
    @property
    def in_a_row(self) -> int: ...

class Dispatch:
    """
    Where the rows of a forward go; see tesserae/experts/dispatch.h.
    """
    @property
    def counts(self) -> torch.Tensor:
        """
        [experts of this rank] int64, on the host: rows of each.
        """

class DialServer:
    """
    What answers at dial.sock; rank 0's.
    """
    def tell(self, client: typing.SupportsInt | typing.SupportsIndex, event: str) -> None:
        """
        An event (tesserae/dial/protocol.h), as JSON text.
        """

class Dial:
    """
    When a job changes its degrees; see tesserae/dial/dial.h.
    """
    def __init__(
        self,
        *,
        unit: Unit,
        schedule: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex,
                tuple[
                    typing.SupportsInt | typing.SupportsIndex,
                    typing.SupportsInt | typing.SupportsIndex,
                    typing.SupportsInt | typing.SupportsIndex,
                ],
            ]
        ],
        automatic: bool,
        headroom: typing.SupportsFloat | typing.SupportsIndex,
        planned_steps: typing.SupportsInt | typing.SupportsIndex,
        folder: str,
        state_per_master: typing.SupportsFloat | typing.SupportsIndex,
        cannot_scale: collections.abc.Callable | None = None,
        server: DialServer = None,
    ) -> None: ...
    def at_step_edge(
        self, step: typing.SupportsInt | typing.SupportsIndex, seconds: typing.SupportsFloat | typing.SupportsIndex
    ) -> tuple[int, int, int] | None:
        """
        Collective: the degrees to change to after this step, the same on all ranks; None: as they are.
        """
    def changed(self, change: Resharding) -> None: ...
    def hand_over(self) -> DialServer:
        """
        Rank 0's server, for the next dial; None elsewhere.
        """
    def refused(self, why: str) -> None: ...
    @property
    def scaling(self) -> tuple[int, int] | None:
        """
        Another number of ranks that the last edge said was asked for, and by whom; the same number on all ranks.
        """

class Page:
    """
    Serves the page of a run until it is gone; see tesserae/watch/server.h.
    """
    def __init__(
        self, *, folder: str, host: str, port: typing.SupportsInt | typing.SupportsIndex, allow_control: bool
    ) -> None: ...
    @property
    def url(self) -> str: ...

class Monitor:
    """
    What a rank does and how long it takes; see tesserae/monitor/monitor.h.
    """
    def __init__(
        self,
        *,
        unit: Unit,
        folder: str,
        every_seconds: typing.SupportsFloat | typing.SupportsIndex,
        job: str,
        optimizer_bytes: collections.abc.Callable,
        stacks: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
    ) -> None:
        """
        `unit`: of the model whose job is watched; `folder`: of the run, "": nothing is written; `job`: JSON; `stacks`: a signal
        at which faulthandler writes to a file, and its descriptor, or -1.
        """
    def end(self, how: str) -> None: ...
    def enter(self, stage: str) -> None: ...
    def next_forward_has(self, tokens: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        What the forward that is about to begin takes in.
        """
    def set_degrees(
        self,
        degrees: tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ],
    ) -> None: ...
    def status(self) -> str:
        """
        What now.json holds, as JSON text: on rank 0 of the whole job, elsewhere of this rank.
        """
    def tell(self, step: typing.SupportsInt | typing.SupportsIndex, kind: str, text: str) -> None: ...
    def watch(self, unit: Unit) -> None:
        """
        Times all units of that one's engine. Between steps.
        """

class Damaged(Corruption):
    """
    A checkpoint is not what was written. `file`; `tensor` ("": none, or unknown); `offset`: byte of the file, or None.
    """

    file: typing.ClassVar[str] = ""
    offset = None
    tensor: typing.ClassVar[str] = ""

class SaveFailed(IoError):
    """
    `step` was not saved, on whatever rank it failed. Older checkpoints are as they were; training may go on.
    """

    step: typing.ClassVar[int] = 0

class Piece:
    """
    This rank's part of one tensor; see tesserae/checkpoint/state.h.
    """
    def __init__(
        self,
        name: str,
        shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        begin: typing.SupportsInt | typing.SupportsIndex,
        end: typing.SupportsInt | typing.SupportsIndex,
        data: torch.Tensor,
        *,
        split: Splits | None = None,
        written: bool = True,
        changes_in_forward: bool = False,
        optional: bool = False,
    ) -> None:
        """
        Elements [begin, end) of the flattened tensor, or of its part that `split` means, are in `data`, contiguous: the memory to save or to fill.
        """

class Checkpoint:
    """
    A committed checkpoint, open for reading.
    """
    @staticmethod
    def open(path: str) -> Checkpoint: ...
    def read(self, name: str) -> torch.Tensor:
        """
        One tensor, whole, on the host, checked.
        """
    def tensors(self) -> dict[str, tuple[list[int], torch.dtype]]:
        """
        Name -> (shape, dtype).
        """
    @property
    def path(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def training(self) -> str:
        """
        JSON text.
        """

class State:
    """
    What a save takes; see tesserae/checkpoint/state.h.
    """
    def __init__(
        self,
        fabric: Fabric,
        *,
        step: typing.SupportsInt | typing.SupportsIndex,
        degrees: tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ],
        tensor: typing.SupportsInt | typing.SupportsIndex,
        expert: typing.SupportsInt | typing.SupportsIndex,
        pieces: collections.abc.Sequence[Piece],
        training: str,
    ) -> None:
        """
        `training`: JSON text; rank 0's is kept.
        """

class HeldState:
    """
    See tesserae/checkpoint/held_state.h.
    """
    def __init__(self, fabric: Fabric, state: State, own: collections.abc.Sequence[Piece]) -> None:
        """
        Collective.
        """
    @property
    def state(self) -> State: ...

class Saver:
    """
    See tesserae/checkpoint/saver.h.
    """
    def __init__(self, fabric: Fabric) -> None:
        """
        Collective.
        """
    def finish(self) -> None:
        """
        Collective.
        """
    def finish_if_done(self) -> bool:
        """
        Collective: False if a rank is not done yet and none has failed; else finish().
        """
    def leave(self) -> None:
        """
        Of a save whose other ranks may be lost: this rank's part is written to its end.
        """
    def save(
        self,
        folder: str,
        keep: typing.SupportsInt | typing.SupportsIndex,
        read_back: bool,
        state: State,
        asynchronous: bool,
    ) -> None:
        """
        Collective: finishes the last save, then saves the state, or begins to.
        """
    def wait_copied(self) -> None: ...

class TokenStream:
    """
    The tokens of files; see tesserae/data/token_stream.h.
    """
    def __init__(
        self,
        paths: collections.abc.Sequence[str],
        *,
        format: str,
        suffixes: collections.abc.Sequence[str] = [],
        vocabulary: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def document_end(self) -> int | None: ...
    @property
    def files(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...

class Loader:
    """
    Batches of streams with weights; see tesserae/data/loader.h.
    """
    def __init__(
        self,
        sources: collections.abc.Sequence[tuple[TokenStream, typing.SupportsFloat | typing.SupportsIndex]],
        *,
        length: typing.SupportsInt | typing.SupportsIndex,
        batch: typing.SupportsInt | typing.SupportsIndex,
        rank: typing.SupportsInt | typing.SupportsIndex = 0,
        ranks: typing.SupportsInt | typing.SupportsIndex = 1,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        validation_fraction: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    ) -> None: ...
    def training_batch(self, sample: typing.SupportsInt | typing.SupportsIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """
        This rank's tokens and targets of the batch of all ranks that begins at that sample, counted from the start.
        """
    def validation_batch(self, index: typing.SupportsInt | typing.SupportsIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The same at every call.
        """
    @property
    def fingerprints(self) -> list[str]:
        """
        Of each source: the files that it has, in order.
        """
    @property
    def global_batch(self) -> int: ...
    @property
    def training_samples(self) -> int: ...
    @property
    def validation_samples(self) -> int: ...

class TokenWriter:
    """
    Writes a token file (docs/format.md) from its first token to its last, in little memory: there is no file of that name before finish().
    """
    def __init__(
        self,
        path: str,
        *,
        vocabulary: typing.SupportsInt | typing.SupportsIndex,
        document_end: typing.SupportsInt | typing.SupportsIndex | None = None,
        bytes_per_token: typing.SupportsInt | typing.SupportsIndex = 0,
        header: bool = True,
        replace: bool = False,
    ) -> None:
        """
        document_end: the token after each document. bytes_per_token: 2 or 4; 0: the fewest that hold the vocabulary. header=False: the tokens alone. Raises InvalidArgument, also for a file that is there unless replace=True, and IoError.
        """
    def add(self, tokens: bytes) -> None:
        """
        The bytes of uint32 numbers of this machine: array.array('I', ids).tobytes(). Raises InvalidArgument for one that is not below the vocabulary.
        """
    def discard(self) -> None:
        """
        Gives up what was not finished.
        """
    def finish(self) -> None:
        """
        The file has its name, and is on the disk, afterwards.
        """
    @property
    def bytes_per_token(self) -> int:
        """
        In the file: 2 or 4.
        """
    @property
    def tokens(self) -> int:
        """
        That were added.
        """

def abort_process_group(group: torch.distributed.distributed_c10d.ProcessGroup) -> None:
    """
    A process group of torch that has failed, in a process that goes on: what blocks in it fails, also elsewhere.
    """

def agree(fabric: Fabric, failure: str) -> tuple[int, str] | None:
    """
    Collective: the lowest rank with a failure (a text that is not empty) and its text; None if there is none.
    """

def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """
    The same memory as a plain tensor, whatever class it has.
    """

def all_degrees(ranks: typing.SupportsInt | typing.SupportsIndex) -> list[tuple[int, int, int]]:
    """
    Every valid (parameters, gradients, optimizer) for so many ranks.
    """

def begins_as_token_file(path: str) -> bool:
    """
    Whether the file has the header of a token file.
    """

def check_degrees(
    ranks: typing.SupportsInt | typing.SupportsIndex,
    *,
    tensor: typing.SupportsInt | typing.SupportsIndex,
    context: typing.SupportsInt | typing.SupportsIndex,
    expert: typing.SupportsInt | typing.SupportsIndex,
    degrees: collections.abc.Sequence[
        tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ],
) -> None:
    """
    Raises InvalidArgument if some degrees do not fit the ranks of a job with these tensor-, context- and expert-parallel degrees; it names what would.
    """

def chunk(
    ranks: typing.SupportsInt | typing.SupportsIndex,
    degrees: tuple[
        typing.SupportsInt | typing.SupportsIndex,
        typing.SupportsInt | typing.SupportsIndex,
        typing.SupportsInt | typing.SupportsIndex,
    ],
    rank: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Which of the chunks of the masters the rank holds.
    """

def clip_gradients(
    unit: Unit,
    max_norm: typing.SupportsFloat | typing.SupportsIndex,
    norm_type: typing.SupportsFloat | typing.SupportsIndex,
    whole: collections.abc.Sequence[torch.Tensor],
) -> float:
    """
    Collective: scales the gradients of the unit's engine, and `whole` of each rank, to this norm at most together; returns the norm that they had.
    """

def column_linear(
    x: torch.Tensor,
    weights: collections.abc.Sequence[torch.Tensor],
    biases: collections.abc.Sequence[torch.Tensor | None],
    parallel: Parallel,
) -> list[torch.Tensor]:
    """
    y_i = x W_i^T + b_i for weights cut by rows, which all read the same x; all have a bias or none (None).
    """

def combine(rows: torch.Tensor, weights: torch.Tensor, plan: Dispatch) -> torch.Tensor:
    """
    The reverse: for each token the sum of its rows, times weights [tokens, k].
    """

def compare_replicas(unit: Unit, state: typing.Any) -> ReplicaReport:
    """
    Collective: compares what ranks of the unit's engine hold alike; see tesserae/shard/replica_check.h. `state`: as for reshard().
    """

def connect_process_group(
    store: torch.distributed.distributed_c10d.Store,
    rank: typing.SupportsInt | typing.SupportsIndex,
    size: typing.SupportsInt | typing.SupportsIndex,
    *,
    name: str,
    global_ranks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    timeout: typing.SupportsFloat | typing.SupportsIndex,
    served: bool,
) -> torch._C._distributed_c10d.Backend:
    """
    Collective: a process group of torch over shared memory. `global_ranks`: empty for the default group.
    """

def context_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequence: ContextSequence,
    *,
    scale: typing.SupportsFloat | typing.SupportsIndex | None = None,
    causal: bool | None = None,
    window: typing.SupportsInt | typing.SupportsIndex | None = None,
) -> torch.Tensor:
    """
    Attention of this rank's queries [batch, heads, tokens, width] to the keys and values of all ranks; see tesserae/context/attention.h. causal, window: where they differ from what the sequence was cut for.
    """

def copy_paged(to: torch.Tensor, source: torch.Tensor) -> None:
    """
    Block by block; `to` is contiguous, and so is what of `source` lies on a disk.
    """

def copy_to_parallel(x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """
    The same tensor, whose gradients, which are partial, are summed.
    """

def dispatch(x: torch.Tensor, plan: Dispatch) -> torch.Tensor:
    """
    The rows [sum of counts, width] that this rank's experts work on, by expert, for x [tokens, width].
    """

def experts_of_rank(
    experts: typing.SupportsInt | typing.SupportsIndex, degree: typing.SupportsInt | typing.SupportsIndex
) -> int:
    """
    experts / degree. Raises InvalidArgument, naming the degrees that would do.
    """

def extend_gather(unit: Unit, number: typing.SupportsInt | typing.SupportsIndex, extension: typing.Any) -> None:
    """
    `extension.inputs()` and `.make(outputs, first)` in place of the gather of the constructor's parameter of that number; see tesserae/shard/gather_extension.h. Of units that are cut by rows, before the first step.
    """

def find_documents(
    tokens: torch.Tensor, document_end: typing.SupportsInt | typing.SupportsIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Positions in their documents, and where documents begin in the batch as one row; see tesserae/data/documents.h.
    """

def flat_buffers(unit: typing.Any) -> list[FlatBuffer]: ...
def flat_slices(
    unit: Unit, index: typing.SupportsInt | typing.SupportsIndex
) -> tuple[bool, list[tuple[int, int, int, int]]]:
    """
    Whether this rank writes its part of a flat buffer, and (slot, begin, end, offset) for each slot in the part: elements [begin, end) of the part are those of the slot from `offset` on.
    """

def gather_from(x: torch.Tensor, dim: typing.SupportsInt | typing.SupportsIndex, parallel: Parallel) -> torch.Tensor:
    """
    Puts split pieces along `dim` together.
    """

def gather_sequence(
    x: torch.Tensor, dim: typing.SupportsInt | typing.SupportsIndex, parallel: Parallel
) -> torch.Tensor:
    """
    Puts split pieces along `dim` together for split computation: the gradient, which is partial, is summed and cut.
    """

def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """
    y = x W_g^T for rows x [rows, in] that are ordered by group, weight [groups, out, in], counts [groups] on the host.
    """

def heads_of_rank(
    query: typing.SupportsInt | typing.SupportsIndex,
    key_value: typing.SupportsInt | typing.SupportsIndex,
    parallel: Parallel,
) -> tuple[int, int]:
    """
    How many heads each rank has. Raises InvalidArgument, naming the degrees that would do.
    """

def in_backward() -> bool:
    """
    Whether this thread runs a backward.
    """

def is_paged(tensor: torch.Tensor) -> bool:
    """
    Whether it, or what it is a view of, lies on a disk.
    """

def keep_freed_memory() -> None:
    """
    What a step frees is not given back to the system; see tesserae/os/memory.h.
    """

def list_checkpoints(folder: str) -> list[tuple[int, str]]:
    """
    (step, path) of the committed checkpoints of a folder, oldest step first.
    """

def load_checkpoint(
    fabric: Fabric, path: str, collect: collections.abc.Callable, check: collections.abc.Callable
) -> Checkpoint | None:
    """
    Collective: loads a checkpoint, or the newest of a folder that can be loaded on all ranks; None if the folder has none. collect(checkpoint) -> the pieces to fill, check() when they are filled.
    """

def missing_in_process_groups() -> list[int]:
    """
    Torch's ranks for which others waited when operations of our process groups failed at their deadline.
    """

def parameter_group(
    ranks: typing.SupportsInt | typing.SupportsIndex,
    degrees: tuple[
        typing.SupportsInt | typing.SupportsIndex,
        typing.SupportsInt | typing.SupportsIndex,
        typing.SupportsInt | typing.SupportsIndex,
    ],
    rank: typing.SupportsInt | typing.SupportsIndex,
) -> list[int]:
    """
    The ranks that together hold all parameter pieces.
    """

def part_of(whole: torch.Tensor, splits: Splits) -> torch.Tensor:
    """
    The part of a whole tensor that `splits` mean, contiguous, padding zero.
    """

def plan_dispatch(
    choice: torch.Tensor, experts: typing.SupportsInt | typing.SupportsIndex, mesh: MeshFabric
) -> Dispatch:
    """
    choice [tokens, k] int64: the experts of each token, of `experts` in all; nothing is dropped. Collective over the expert axis, as the two functions below are, forward and backward. Raises InvalidArgument.
    """

def prefetch(tensors: collections.abc.Sequence[torch.Tensor]) -> None:
    """
    Starts to read what lies on a disk, as far as there is room.
    """

def publish_unit(unit: Unit) -> None:
    """
    Collective: new values of the unit's parts are what the next forward sees.
    """

def read_config_file(path: str) -> str:
    """
    The JSON object in that file, unchecked, as JSON text. Comments are skipped; InvalidArgument names the line of what is no JSON.
    """

def reduce_from(x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """
    The sum of a partial tensor; the gradient stays as it is.
    """

def reduce_scatter_sequence(
    x: torch.Tensor, dim: typing.SupportsInt | typing.SupportsIndex, parallel: Parallel
) -> torch.Tensor:
    """
    This rank's piece along `dim` of the sum of a partial tensor; the gradient is put together.
    """

def replica_group(
    ranks: typing.SupportsInt | typing.SupportsIndex,
    degrees: tuple[
        typing.SupportsInt | typing.SupportsIndex,
        typing.SupportsInt | typing.SupportsIndex,
        typing.SupportsInt | typing.SupportsIndex,
    ],
    rank: typing.SupportsInt | typing.SupportsIndex,
) -> list[int]:
    """
    The ranks that hold the same chunk.
    """

def reshard(
    unit: Unit,
    degrees: tuple[
        typing.SupportsInt | typing.SupportsIndex,
        typing.SupportsInt | typing.SupportsIndex,
        typing.SupportsInt | typing.SupportsIndex,
    ],
    state: typing.Any,
) -> Resharding:
    """
    Collective: the engine of that unit goes over to (parameters, gradients, optimizer) between steps. `state` keeps tensors beside its shards: dtypes(shard), take(shard) and put(shard, tensors), as in tesserae/shard/companion.h.
    """

def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parallel: Parallel,
    sequence_dim: typing.SupportsInt | typing.SupportsIndex | None = None,
) -> torch.Tensor:
    """
    y = x W^T + b for a weight cut by columns and x split along its last dimension; y is repeated or split along the sequence.
    """

def sagemaker_parameters() -> str | None:
    """
    The modelparallel parameters that the estimator of a training job of SageMaker gave, as JSON text; None where there are none. InvalidArgument names what cannot work.
    """

def save_held(
    fabric: Fabric, held: HeldState | None, folder: str, keep: typing.SupportsInt | typing.SupportsIndex
) -> int | None:
    """
    Collective: saves what the ranks hold together, if that is a whole state and newer than what the folder has. Returns its step, or None.
    """

def scatter_to(x: torch.Tensor, dim: typing.SupportsInt | typing.SupportsIndex, parallel: Parallel) -> torch.Tensor:
    """
    This rank's piece of a repeated tensor.
    """

def set_gatherer(unit: Unit, comm: typing.Any, group: typing.Any) -> None:
    """
    `comm`, an AllGather of torch's FSDP2, gathers the unit's parameters; None: the engine. `group`: what it is called with.
    """

def set_scatterer(unit: Unit, comm: typing.Any, group: typing.Any) -> None:
    """
    The same of a ReduceScatter, for the sum of gradients over the ranks that shard them.
    """

def shutdown_process_groups() -> None:
    """
    Ends all of them, before the process ends.
    """

def size_of_part(what: str, size: typing.SupportsInt | typing.SupportsIndex, parallel: Parallel) -> int:
    """
    Raises InvalidArgument, naming `what` and the degrees that would do, unless the ranks divide `size`.
    """

def unit_degrees(unit: Unit) -> tuple[int, int, int]:
    """
    (parameters, gradients, optimizer).
    """

def unit_fabric(unit: Unit) -> Fabric: ...
def unsplit_embedding(
    tokens: torch.Tensor, weight: torch.Tensor, padding_index: typing.SupportsInt | typing.SupportsIndex = -1
) -> torch.Tensor:
    """
    torch's embedding; the gradient of the weight is computed where it will be reduced.
    """

def unsplit_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, widened: bool = False
) -> torch.Tensor:
    """
    torch's linear; the gradient of the weight is computed where it will be reduced. widened: bf16 and fp16 are multiplied in fp32 on CPUs without AVX-512.
    """

def use_reusable_host_blocks() -> None:
    """
    What a step frees serves the next one; see tesserae/offload/host_blocks.h.
    """

def validate_init_config(document: str) -> str:
    """
    A configuration of tsm.init, as JSON text, checked and with every default filled in. InvalidArgument names the key that cannot work.
    """

def vocabulary_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: typing.SupportsInt | typing.SupportsIndex,
    parallel: Parallel,
    ignored: typing.SupportsInt | typing.SupportsIndex = -100,
) -> torch.Tensor:
    """
    Of each token, fp32, from this rank's columns of the logits.
    """

def vocabulary_embedding(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    parallel: Parallel,
    vocabulary: typing.SupportsInt | typing.SupportsIndex,
) -> torch.Tensor: ...
def waits_unseen() -> None:
    """
    This process may wait in groups that are not ours: no other rank takes it for absent any more.
    """

def write_checkpoint(
    folder: str,
    step: typing.SupportsInt | typing.SupportsIndex,
    training: str,
    tensors: collections.abc.Sequence[
        tuple[
            str,
            torch.dtype,
            collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
            collections.abc.Callable,
        ]
    ],
) -> str:
    """
    Writes a checkpoint from one process: (name, dtype, shape, fetch) for each tensor, where fetch() returns the tensor when its turn comes and it is not kept. Returns the checkpoint's directory.
    """
