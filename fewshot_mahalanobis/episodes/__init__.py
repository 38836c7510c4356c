"""Image sources and the episodes drawn from them, for meta-training and evaluation."""
