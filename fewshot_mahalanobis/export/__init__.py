"""A fitted classifier as something that runs without this package: a graph, or a page in the browser."""
