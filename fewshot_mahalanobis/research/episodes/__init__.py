"""Episodes drawn from image sources."""
