"""What each rank of a script does, how long it takes, and who is slow."""
