"""tsm.state: the configuration and the place of this rank in the job, with the names of SMP v2."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tesserae import _C
from tesserae import config as configuration


class State:
    """Read-only. Everything raises InvalidArgument before tsm.init(); groups also before init_process_group()."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str], dist.ProcessGroup | None] = {}

    # ---- what tsm.init was given ----
    @property
    def hybrid_shard_degree(self) -> int:
        """Over how many ranks the training state is sharded; 0: as the script says."""
        return self._config().hybrid_shard_degree

    @property
    def tensor_parallel_degree(self) -> int:
        return self._config().tensor_parallel_degree

    @property
    def context_parallel_degree(self) -> int:
        return self._config().context_parallel_degree

    @property
    def expert_parallel_degree(self) -> int:
        return self._config().expert_parallel_degree

    @property
    def sm_activation_offloading(self) -> bool:
        return self._config().sm_activation_offloading

    @property
    def activation_loading_horizon(self) -> int:
        return self._config().activation_loading_horizon

    @property
    def random_seed(self) -> int:
        return self._config().random_seed

    # ---- the job ----
    @property
    def rank(self) -> int:
        """In [0, world_size). Before init_process_group(): what the launcher says, 0 without one."""
        self._config()
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        self._config()
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))

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

    # ---- tensor parallelism: what the mesh of the job says (_C.Mesh), with the names of SMP v2 ----
    @property
    def tp_size(self) -> int:
        return self.tensor_parallel_degree

    @property
    def tp_rank(self) -> int:
        return self._mesh().index("tensor", self.rank)

    @property
    def tp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks among which layers are split, by tp_rank; they read the same data. Made at the first access, which
        these ranks make together."""
        return self._group("tp_process_group", self.tp_ranks)

    @property
    def dp_size(self) -> int:
        """How many different batches a step has: world_size / tp_size."""
        return self._mesh().degree("batch")

    @property
    def dp_rank(self) -> int:
        return self._mesh().index("batch", self.rank)

    @property
    def dp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks of this tp_rank, by dp_rank: FSDP shards over them. Made at the first access, which these ranks
        make together."""
        return self._group("dp_process_group", self.dp_ranks)

    def tp_ranks(self) -> list[int]:
        """Of the job. Raises InvalidArgument, naming the nearest degrees, if tp_size does not divide its ranks."""
        return self._mesh().members("tensor", self.rank)

    def dp_ranks(self) -> list[int]:
        return self._mesh().members("state", self.rank)

    # ----
    def _mesh(self) -> _C.Mesh:
        return _C.Mesh(self.world_size, tensor=self.tp_size)

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
        return c10d._get_default_group()

    def _group(self, name: str, members: Callable[[], list[int] | None]) -> dist.ProcessGroup | None:
        self._config()
        key = (id(self._default_group(name)), name)  # a script may end its job and start another
        if key not in self._groups:
            ranks = members()
            self._groups[key] = None
            if ranks is not None:
                self._groups[key] = dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False)
        return self._groups[key]

    def _replicas(self) -> list[int] | None:
        from tesserae.job import state_fabric

        degrees = configuration.degrees_of(self._config())
        if degrees is None:
            return None
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        fabric = state_fabric(device)
        ranks = [fabric.joined_rank(rank) for rank in _C.replica_group(fabric.size, degrees, fabric.rank)]
        return ranks if self.tp_size == 1 else [self.dp_ranks()[rank] for rank in ranks]

    def forget_replicas(self) -> None:
        """The degree has changed."""
        self._groups = {key: group for key, group in self._groups.items() if key[1] != "rep_rank_process_group"}

    def forget(self) -> None:
        """For tsm.uninstall."""
        self._groups.clear()


state = State()
