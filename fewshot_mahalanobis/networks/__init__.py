"""The networks: set encoder, FiLM generators, FiLM ResNet18, and Simple CNAPS that joins them."""
