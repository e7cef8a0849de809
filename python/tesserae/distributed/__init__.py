"""SMP v2's name for the package of its checkpoints."""
