"""Speed side by side with other ways to do the same: ``python -m benchmarks``."""
