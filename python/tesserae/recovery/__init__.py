"""A script goes on when a rank is lost."""
