"""The class that takes the place of torch.distributed.fsdp.FullyShardedDataParallel.

fully_sharded.py     the class: what scripts call
install.py           torch's name -> ours, for every script that holds the name
arguments.py         the arguments of the constructor -> how the engine shards
groups.py            process groups and meshes of the script -> a fabric and three degrees
construction.py      the constructor, step by step
instance.py          what these parts know of an instance: one unit
parameters.py        the two faces of a parameter: what a module computes with, what an optimizer sees
flat_parameters.py   the flat parameters of a unit, for who reads them
forward.py           what the root's forward does before its module is called, and who is told
whole.py             whole parameters between steps: summon_full_params
state_dicts.py       state dicts of modules; state_saving.py and state_loading.py
optim_state_dicts.py state dicts of optimizers; optim_keys.py, optim_contents.py, optim_saving.py, optim_loading.py
sharded_values.py    values that are spread over ranks, as those state dicts have them
retired.py           optimizers that hold parameters which have been sharded since
"""

from tesserae.fsdp.fully_sharded import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
