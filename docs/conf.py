"""Sphinx: pages in Markdown, the reference from docstrings. `sphinx-build -W docs build/docs`."""

import rlskip

project = "rlskip"
author = "The rlskip developers"
copyright = author
version = release = rlskip.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"  # `name` in a docstring
myst_heading_anchors = 3

napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "mixed"
# Hosts are not installed where the pages are built.
autodoc_mock_imports = ["transfer_queue", "verl", "trl", "skyrl"]
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "rlskip"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sphinx = False
html_copy_source = False
