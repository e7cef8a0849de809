"""tsm.state.ranker: which ranks of the job hold the same shard, by the names of SMP v2."""

from __future__ import annotations

from collections.abc import Callable

from tesserae import _C


class Ranker:
    """Of tsm.init's degrees, as the dial has them now. Where the script decides on the degree (0), each rank counts as
    the only one with its shard."""

    def __init__(self, shards: Callable[[], tuple[list[list[int]], list[list[int]]]]) -> None:
        """`shards`: positions among the ranks that share out a state, those that hold the same shard together; and
        these ranks of the job, for each tensor-parallel index."""
        self._shards = shards

    def get_rep_groups(self) -> list[list[int]]:
        """The ranks of the job, those that hold the same shard together, in the order of rep_rank_process_group. The
        first call is collective."""
        replicas, over = self._shards()
        return sorted([ranks[place] for place in places] for ranks in over for places in replicas)

    def get_rep_rank(self, global_rank: int) -> int:
        """How many ranks before this one hold the same shard: where it is 0, a checkpoint misses nothing."""
        for ranks in self.get_rep_groups():
            if global_rank in ranks:
                return ranks.index(global_rank)
        raise _C.InvalidArgument(f"[tsm.state.ranker] the job has no rank {global_rank}")
