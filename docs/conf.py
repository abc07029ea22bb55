"""Configuration of the documentation: `sphinx-build -W --keep-going -b html docs OUT`.
It needs no network.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS / "_ext")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from docutils.nodes import SkipNode  # noqa: E402
from latex2mathml.converter import convert  # noqa: E402

import rampup  # noqa: E402 - found through the path above

project = "rampup"
author = "The rampup authors"
copyright = author
version = release = rampup.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated_reference",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_ext", "_templates"]


def remove_generated(*_):
    """Delete what a build writes below docs/: the copied notebooks and the pages of the
    API.
    """
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        (DOCS / "tutorials" / notebook.name).unlink(missing_ok=True)
    for folder in ("reference/api", "jupyter_execute"):
        shutil.rmtree(DOCS / folder, ignore_errors=True)


# Also before a build, because one that was interrupted leaves them.
remove_generated()

# The tutorials are the notebooks of the repository. Sphinx reads sources below docs/
# only, so they are copied here.
for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
    shutil.copyfile(notebook, DOCS / "tutorials" / notebook.name)

# The pages show the outputs of the notebooks, which a build runs: some minutes on a CPU.
# RAMPUP_DOCS_NOTEBOOKS=off leaves them out, for whoever writes pages.
nb_execution_mode = os.environ.get("RAMPUP_DOCS_NOTEBOOKS", "force")
nb_execution_raise_on_error = True
nb_execution_timeout = 600
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# A single-backquoted name in a docstring is code.
default_role = "code"
# Several classes have an attribute of the same name.
suppress_warnings = ["ref.python"]
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

# Links to the documentation of JAX, Flax and Optax need their inventories, and so the
# network.
if os.environ.get("RAMPUP_DOCS_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "flax": ("https://flax.readthedocs.io/en/latest", None),
        "optax": ("https://optax.readthedocs.io/en/latest", None),
    }

html_theme = "sphinx_book_theme"
html_title = "rampup"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    # The sidebar has a search field.
    "navbar_persistent": [],
}
# Browsers draw MathML by themselves; MathJax would come from the network.
html_math_renderer = "mathml"
html_show_sourcelink = False
html_copy_source = False


def draw_math(writer, node):
    """Write a formula as MathML."""
    tex = node.astext()
    for character, command in {"·": r"\cdot ", "≤": r"\le ", "≥": r"\ge "}.items():
        tex = tex.replace(character, command)
    is_block = node.tagname == "math_block"
    writer.body.append(convert(tex, display="block" if is_block else "inline"))
    raise SkipNode


def setup(app):
    """Leave the checkout as it was, and draw formulas."""
    app.connect("build-finished", remove_generated)
    app.add_html_math_renderer("mathml", (draw_math, None), (draw_math, None))
