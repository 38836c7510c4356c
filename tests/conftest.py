"""Tests that run side by side (pytest-xdist) compute in one thread each, and so do the processes that they start."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before PyTorch is imported
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
