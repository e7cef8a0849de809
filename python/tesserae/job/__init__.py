"""What tsm.init was given, and the ranks of this job.

config.py      the configuration: from a file or a dict to one frozen object, and the degrees as they are now
device.py      where this rank computes
fabrics.py     connections of the engine, by the script's process groups
state.py       tsm.state: degrees, ranks and process groups by the names of SMP v2
preemption.py  tsm.preemption: whether the job is to end before its work is done
backend.py     torch.distributed's backend "tesserae"
"""
