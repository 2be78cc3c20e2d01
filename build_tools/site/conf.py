"""Sphinx's settings; `python -m build_tools.make_site` runs it over what it staged."""

from pathlib import Path

import flash_attn

project = "flash_attn"
author = "The flash_attn authors"
version = release = f"{flash_attn.__version__}, build {flash_attn.__build__}"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Anchors of headings as they are where the repository is read, so that links hold in both.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False  # torch's, about any module's forward
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "flash_attn"
html_static_path = [str(Path(__file__).with_name("static"))]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "native"
highlight_language = "text"


def setup(app):
    # The parameter for unknown keywords is there for its message; a signature does not show it.
    app.connect(
        "autodoc-process-signature",
        lambda app, what, name, obj, options, signature, returns: (
            signature and signature.replace(", **unknown: NoReturn", ""),
            returns,
        ),
    )
