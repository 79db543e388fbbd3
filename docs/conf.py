"""Sphinx's settings: the site is made of the Markdown files of the repository.

sphinx-build -W --keep-going -c docs . build/site
"""

import re
import shutil
from pathlib import Path
from pydoc import locate

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent

project = "vllm-diffusion"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project
html_show_sphinx = False
html_copy_source = False
# Options keep their two hyphens.
smartquotes = False
pygments_style = "default"
pygments_dark_style = "github-dark"
# The same section links, and images of a given width, as on GitHub.
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/RESULTS.md"]
exclude_patterns = [".*", "build"]


def navigation() -> str:
    """Return tables of contents for the side of each page, from the links of ``docs/README.md``."""
    sections = re.split(r"^## (.+)$", (HERE / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    parts = ["", "```{toctree}", ":hidden:", "", "docs/README", "```"]
    for title, section in zip(sections[1::2], sections[2::2], strict=True):
        links = dict.fromkeys(re.findall(r"\]\(([^)#]+)\.md", section))
        pages = [f"docs/{link}" if "../" not in link else link.replace("../", "") for link in links]
        parts += ["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]
    return "\n".join(parts) + "\n"


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the navigation to the first page."""
    if page == root_doc:
        source[0] += navigation()


def add_docstrings(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace each name of the reference of ``docs/use/python.md``, a list in Markdown, by its
    docstring.
    """
    if page == "docs/use/python":
        source[0] = re.sub(
            r"^- `(vllm_diffusion\.\S+)`$", _directive, source[0], flags=re.MULTILINE
        )


def _directive(name: re.Match[str]) -> str:
    found = locate(name[1])
    kind = "function"
    if isinstance(found, type):
        kind = "exception" if issubclass(found, BaseException) else "class"
    return f"```{{eval-rst}}\n.. auto{kind}:: {name[1]}\n```"


def open_with_readme(app: Sphinx, error: Exception | None) -> None:
    """Let the first page be the one that a browser opens for the folder."""
    if error is None:
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Register what Sphinx does not know: two steps, and blocks that a test of the package
    reads.
    """
    app.add_lexer("floors", TextLexer)
    app.connect("source-read", add_navigation)
    app.connect("source-read", add_docstrings)
    app.connect("build-finished", open_with_readme)
