"""Sphinx configuration."""

project = "fewshot_mahalanobis"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
autodoc_typehints = "none"
napoleon_use_rtype = False
html_theme = "alabaster"
# What scikit-learn adds for its metadata routing is documented there.
autodoc_default_options = {"exclude-members": "set_partial_fit_request, set_score_request"}
