"""The state of torch's optimizers on a disk."""
