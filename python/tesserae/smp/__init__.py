"""What Amazon's SageMaker model parallelism library v2 (SMP v2) calls by these names; `import torch.sagemaker` finds it
under tesserae.run. tsm.state is in job/state.py.

init.py           tsm.init, tsm.is_initialized, tsm.uninstall
transformation.py tsm.transform; what it puts into a model is in tensor_parallel/, experts/ and context/
delayed_param.py  DelayedParamIniter: models that get their values while FSDP wraps them
module_utils.py   tensors of a module on a device
state_dicts.py    save, async_save and load of state dicts
small.py          logger, timer, ranks of a group, clipping
alias.py          torch.sagemaker.x is tesserae.x
"""
