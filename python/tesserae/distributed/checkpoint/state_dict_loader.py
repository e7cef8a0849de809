"""SMP v2's function that loads state dicts: what state_dict_saver or tsm.checkpoint has saved."""

from tesserae.smp.state_dicts import load

__all__ = ["load"]
