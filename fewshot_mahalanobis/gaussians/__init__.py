"""Class Gaussians with the regularised covariance of equation 3, and leaving out one example at a time."""
