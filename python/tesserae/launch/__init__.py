"""How a process becomes a rank of a script."""
