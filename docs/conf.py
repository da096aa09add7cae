"""How Sphinx makes the site from these pages: `make docs`, where every warning is an error."""

from importlib import metadata

from sphinx.application import Sphinx

project = "pallas-ce"
author = "The pallas-ce authors"
project_copyright = author
version = release = metadata.version("pallas-ce")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["generated"]  # parts of pages
myst_enable_extensions = ["attrs_block", "attrs_inline"]
myst_heading_anchors = 3

default_role = "code"  # docstrings mark names as Markdown does
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"pallas-ce {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]


def link_within_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Leads links to DESIGN.md, which stands at the root of the repository, to its page."""
    source[0] = source[0].replace("](../DESIGN.md", "](design.md")


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", link_within_the_site)
