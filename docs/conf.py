"""Sphinx configuration."""

project = "fewshot_mahalanobis"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
autodoc_typehints = "none"
napoleon_use_rtype = False
html_theme = "alabaster"
