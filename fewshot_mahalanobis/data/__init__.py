"""Image sources: what episodes are drawn from."""
