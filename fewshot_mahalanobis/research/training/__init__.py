"""Training of the backbone and of the adaptation networks."""
