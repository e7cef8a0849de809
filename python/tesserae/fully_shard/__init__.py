"""torch.distributed.fsdp.fully_shard (FSDP2) on the engine of tesserae.

function.py   fully_shard(): parameters -> DTensors; a state for each call
places.py     a mesh and the configuration -> a fabric, degrees, and how DTensors are placed
parameters.py the parameters of one call: DTensors outside of a step, whole inside
state.py      one call: what happens around its modules' forwards
engine.py     the states below a root -> units of one engine, at the first forward
module.py     FSDPModule: the methods of a sharded module
install.py    torch's name -> ours, for every script that holds the name
clipping.py   torch's clip_grad_norm_ of gradients on several meshes
"""
