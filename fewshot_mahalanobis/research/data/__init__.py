"""Image sources, from which episodes are drawn."""
