"""tsm.state: the configuration and the place of this rank in the job, with the names of SMP v2."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import torch.distributed as dist

from tesserae import _C
from tesserae.job import activations, disk
from tesserae.job import config as configuration
from tesserae.job.device import default_device
from tesserae.job.fabrics import state_fabric
from tesserae.job.ranker import Ranker


def _launched() -> tuple[int, int]:
    """This process's rank, and how many there are: torch's variables, else those of Slurm, MPI and the like."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    launch = _C.Launch()
    return launch.rank, launch.size


class State:
    """Everything raises InvalidArgument before tsm.init(); groups also before init_process_group(). Read-only, but for
    tensor_, context_ and expert_parallel_degree: what a script assigns to them before tsm.init() counts instead of the
    configuration's."""

    def __init__(self) -> None:
        # By the default group: a script may end its job and start another.
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup | None]]
        self._groups = weakref.WeakKeyDictionary()

    # ---- what tsm.init was given ----
    @property
    def hybrid_shard_degree(self) -> int:
        """Over how many ranks the training state is sharded; 0: as the script says."""
        return self._config().hybrid_shard_degree

    @property
    def tensor_parallel_degree(self) -> int:
        """T: over how many ranks single layers are split."""
        return self._degree("tensor_parallel_degree")

    @tensor_parallel_degree.setter
    def tensor_parallel_degree(self, degree: int) -> None:
        configuration.choose("tensor_parallel_degree", degree)

    @property
    def context_parallel_degree(self) -> int:
        """C: over how many ranks sequences are cut."""
        return self._degree("context_parallel_degree")

    @context_parallel_degree.setter
    def context_parallel_degree(self, degree: int) -> None:
        configuration.choose("context_parallel_degree", degree)

    @property
    def expert_parallel_degree(self) -> int:
        """E: over how many ranks the experts of a layer are shared out."""
        return self._degree("expert_parallel_degree")

    @expert_parallel_degree.setter
    def expert_parallel_degree(self, degree: int) -> None:
        configuration.choose("expert_parallel_degree", degree)

    @property
    def sm_activation_offloading(self) -> bool:
        """Whether what torch's offload_wrapper saves in a sharded model goes to Tesserae's store."""
        return self._config().sm_activation_offloading

    @property
    def activation_loading_horizon(self) -> int:
        """How many units ahead activations are brought back."""
        return self._config().activation_loading_horizon

    @property
    def activations(self) -> _C.ActivationCounters | None:
        """What left for host memory or a disk between forward and backward, on this rank; None where nothing can
        (sm_activation_offloading is false)."""
        self._config()
        store = activations.current()
        return store.counters if store is not None else None

    @property
    def disk(self) -> _C.DiskCounters | None:
        """What the state of optimizers on a disk has cost this rank so far; None where none lies there
        (offload.optimizer is "device", or no optimizer was made yet)."""
        self._config()
        opened = disk.current()
        return opened.counters if opened is not None else None

    @property
    def random_seed(self) -> int:
        """What dropout on split activations is seeded with; nothing else in a script is."""
        return self._config().random_seed

    # ---- the job ----
    @property
    def rank(self) -> int:
        """In [0, world_size). Before init_process_group(): what the launcher says, 0 without one."""
        self._config()
        return dist.get_rank() if dist.is_initialized() else _launched()[0]

    @property
    def world_size(self) -> int:
        """How many ranks the job has. Before init_process_group(): what the launcher says, 1 without one."""
        self._config()
        return dist.get_world_size() if dist.is_initialized() else _launched()[1]

    @property
    def world_process_group(self) -> dist.ProcessGroup:
        """All ranks: torch's default group."""
        self._config()
        return self._default_group("world_process_group")

    @property
    def rep_rank_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard as this one; None where the script decides on the degree (0).

        Made at the first access, which all ranks of the job make together.
        """
        return self._group("rep_rank_process_group", self._replicas)

    @property
    def ranker(self) -> Ranker:
        """Which ranks save a state dict, for scripts of SMP v2: all."""
        return Ranker(self.world_size)

    # ---- tensor parallelism: what the mesh of the job says (_C.Mesh), with the names of SMP v2 ----
    @property
    def tp_size(self) -> int:
        """T: how many ranks split layers with this one, itself included."""
        return self.tensor_parallel_degree

    @property
    def tp_rank(self) -> int:
        """This rank among them, in [0, tp_size)."""
        return self._mesh().index("tensor", self.rank)

    @property
    def tp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks among which layers are split, by tp_rank; they read the same data. Made at the first access, which
        these ranks make together."""
        return self._group("tp_process_group", self.tp_ranks)

    # ---- context parallelism ----
    @property
    def cp_size(self) -> int:
        """C: how many ranks share out the positions of the same sequences, this one included."""
        return self.context_parallel_degree

    @property
    def cp_rank(self) -> int:
        """This rank among them, in [0, cp_size)."""
        return self._mesh().index("context", self.rank)

    @property
    def cp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share out the positions of the same sequences, by cp_rank. Made at the first access, which
        these ranks make together."""
        return self._group("cp_process_group", lambda: self._mesh().members("context", self.rank))

    # ---- expert parallelism ----
    @property
    def ep_size(self) -> int:
        """E: how many ranks share out the experts of a layer, this one included."""
        return self.expert_parallel_degree

    @property
    def ep_rank(self) -> int:
        """This rank among them, in [0, ep_size)."""
        return self._mesh().index("expert", self.rank)

    @property
    def ep_process_group(self) -> dist.ProcessGroup | None:
        """The ranks among which the experts of a layer are shared out, by ep_rank; they read different data. Made at
        the first access, which these ranks make together."""
        return self._group("ep_process_group", lambda: self._mesh().members("expert", self.rank))

    @property
    def exp_dp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same experts: their state is sharded over them. Made at the first access, which these
        ranks make together."""
        return self._group("exp_dp_process_group", lambda: self._mesh().members("expert_state", self.rank))

    # ---- data parallelism ----
    @property
    def dp_size(self) -> int:
        """How many different batches a step has: world_size / (tp_size * cp_size)."""
        return self._mesh().degree("batch")

    @property
    def dp_rank(self) -> int:
        """Which of a step's batches this rank reads, in [0, dp_size)."""
        return self._mesh().index("batch", self.rank)

    @property
    def dp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks of this tp_rank: FSDP shards over them. They are dp_size * cp_size. Made at the first access, which
        these ranks make together."""
        return self._group("dp_process_group", self.dp_ranks)

    def tp_ranks(self) -> list[int]:
        """Of the job. Raises InvalidArgument, naming the nearest degrees, if tp_size does not divide its ranks."""
        return self._mesh().members("tensor", self.rank)

    def dp_ranks(self) -> list[int]:
        """Of the job: those of this tp_rank. Raises InvalidArgument as tp_ranks()."""
        return self._mesh().members("state", self.rank)

    # ----
    def _mesh(self) -> _C.Mesh:
        return _C.Mesh(self.world_size, tensor=self.tp_size, context=self.cp_size, expert=self.ep_size)

    def _degree(self, name: str) -> int:
        assigned = configuration.chosen(name)
        return assigned if assigned is not None else getattr(self._config(), name)

    def _config(self) -> configuration.Config:
        config = configuration.current()
        if config is None:
            raise _C.InvalidArgument("[tsm.state] there is nothing to read yet; call tsm.init() first")
        return config

    def _default_group(self, asked: str) -> dist.ProcessGroup:
        if not dist.is_initialized():
            raise _C.InvalidArgument(
                f"[tsm.state.{asked}] torch.distributed is not initialised; call init_process_group() first"
            )
        return dist.group.WORLD

    def _group(self, name: str, members: Callable[[], list[int] | None]) -> dist.ProcessGroup | None:
        self._config()
        groups = self._groups.setdefault(self._default_group(name), {})
        if name not in groups:
            ranks = members()
            groups[name] = None
            if ranks is not None:
                groups[name] = dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False)
        return groups[name]

    def _replicas(self) -> list[int] | None:
        degrees = configuration.degrees_of(self._config())
        if degrees is None:
            return None
        fabric = state_fabric(default_device())
        ranks = [fabric.joined_rank(rank) for rank in _C.replica_group(fabric.size, degrees, fabric.rank)]
        return ranks if self.tp_size == 1 else [self.dp_ranks()[rank] for rank in ranks]

    def forget_replicas(self) -> None:
        """The degree has changed."""
        for groups in self._groups.values():
            groups.pop("rep_rank_process_group", None)

    def forget(self) -> None:
        """For tsm.uninstall."""
        self._groups.clear()


state = State()
