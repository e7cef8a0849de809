"""tsm.state.ranker: which ranks would write the same into a checkpoint, by the names of SMP v2."""

from __future__ import annotations

from tesserae import _C


class Ranker:
    """Scripts of SMP v2 save on ranks of get_rep_rank() 0, over the model's `process_group`. Here a rank's part of a
    state dict is its own, cut over all ranks of that group whatever the sharding degree is: all of them save. Which
    ranks hold the same shard says tsm.state.rep_rank_process_group."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def get_rep_groups(self) -> list[list[int]]:
        """The ranks of the job, each by itself."""
        return [[rank] for rank in range(self._ranks)]

    def get_rep_rank(self, global_rank: int) -> int:
        """0. Raises InvalidArgument for a rank that the job does not have."""
        if not 0 <= global_rank < self._ranks:
            raise _C.InvalidArgument(f"[tsm.state.ranker] {global_rank} is none of the job's {self._ranks} ranks")
        return 0
