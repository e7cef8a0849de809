"""Every name of torch that is private and that Tesserae uses, under a name of ours: no other room knows any.

checked.py         with which torch they were checked; what is said where one is missing
modules.py         what nn.Module keeps for itself, and the wrappers that torch puts around a module
compiled.py        what torch.compile has wrapped
parameters.py      hooks of a parameter
distributed.py     the job's store; values that are sent to ranks and devices
construction.py    what FSDP1's constructor does before it shards
instance.py        FSDP1's class without its constructor: attributes that the rest of torch reads
flat_parameters.py what other libraries read of a flat parameter
optimizers.py      names and keys of an optimizer's parameters
clip.py            what clip_grad_norm_ is made of
sharded_tensors.py tensors that are spread over ranks
"""
