"""SMP v2's names: state_dict_saver and state_dict_loader. In new scripts use tsm.checkpoint."""
