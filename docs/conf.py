"""Sphinx configuration: ``sphinx-build -W docs docs/_build`` builds the site and runs the gallery's scripts."""

import os
import re
from typing import Any

import fewshot_mahalanobis

project = "fewshot_mahalanobis"
author = "The fewshot_mahalanobis developers"
copyright = author
version = release = fewshot_mahalanobis.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "sphinx_llms_txt",  # the site's pages for language models: llms.txt, and all of them in llms-full.txt
    "sphinx-mathjax-offline",  # MathJax in the site itself: no request goes elsewhere
]
templates_path = ["_templates"]
exclude_patterns = ["_build"]

# Markdown: $...$ and $$...$$ are mathematics; headings down to the third level can be linked to.
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 3

# The docstrings give types and shapes; the pages of classes list their methods in full.
autodoc_typehints = "none"
autosummary_generate = True
numpydoc_show_class_members = False
toc_object_entries_show_parents = "hide"
# What scikit-learn adds for its metadata routing is documented there.
autodoc_default_options = {
    "exclude-members": "set_fit_request, set_partial_fit_request, set_score_request, set_predict_request, "
    "set_predict_proba_request, set_predict_log_proba_request"
}

os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars say nothing on a page
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": "/plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "backreferences_dir": None,
    "download_all_examples": False,
    "show_memory": False,
}

# Links that hold wherever the site lies. The summary of every object is in its module's page.
llms_txt_uri_template = "_sources/{docname}{suffix}{sourcelink_suffix}"
llms_txt_exclude = ["generated/*", "changelog"]

# Prompts are not copied with a command.
copybutton_prompt_text = "$ "

html_theme = "pydata_sphinx_theme"
html_title = "fewshot_mahalanobis"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False, "show_prev_next": False}
html_show_sourcelink = False


def for_the_site(text: str) -> str:
    """Links of a page as the site has them: pages of the gallery for its scripts, downloads for other files.

    In the repository the pages link to the files themselves, so that links work for whoever reads them there.
    """
    text = re.sub(r"\]\(\.\./examples\)", "](auto_examples/index.rst)", text)
    text = re.sub(r"\]\(\.\./examples/(plot_\w+)\.py\)", r"](auto_examples/\1.rst)", text)
    return re.sub(
        r"\[([^][]+)\]\((\.\./[^)#\s]+)\)", lambda link: f"{{download}}`{link[1].replace('`', '')} <{link[2]}>`", text
    )


def _rewrite(app: Any, name: str, source: list[str]) -> None:
    source[0] = for_the_site(source[0])


def setup(app: Any) -> None:
    """Let Sphinx rewrite the links of each page as it reads it."""
    app.connect("source-read", _rewrite)
