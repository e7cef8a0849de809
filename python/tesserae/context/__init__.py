"""Context parallelism: sequences that are cut over ranks, and attention that reaches across (docs/context.md)."""
