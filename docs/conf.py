"""How the pages become a site: ``make docs``. Nothing of it needs a network."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "celery_budget"
author = "the celery_budget contributors"
copyright = author  # noqa: A001 - the name that Sphinx gives it
release = version = version_of("celery-budget")

extensions = ["myst_parser", "sphinx.ext.autodoc", "generated"]
exclude_patterns = ["_ext"]

myst_enable_extensions = ["deflist", "tasklist"]
myst_heading_anchors = 4
highlight_language = "text"
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = f"celery_budget {release}"
html_show_sourcelink = False
html_copy_source = False

#: Pages at the root that are part of the site, by the page of the site that stands for each.
ROOT_PAGES = {"README.md": "readme", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}
_NAMES = "|".join(map(re.escape, ROOT_PAGES))
#: A link to one of them, from a page in docs/.
_LINK_UP = re.compile(rf"\]\((?:\.\./)+({_NAMES})(#[^)]*)?\)")
#: A link from one of them to something in the repository.
_LINK_DOWN = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


def lead_to_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Have links to the pages at the root, right for who reads files, lead to their pages here.

    What stands for one of those is that page itself.
    """
    for name, page in ROOT_PAGES.items():
        if page == docname:
            app.env.note_dependency(str(HERE.parent / name))
            text = (HERE.parent / name).read_text(encoding="utf-8")
            source[0] = _LINK_DOWN.sub(lambda found: f"]({_from_here(found[1])})", text)
            return
    up = "../" * docname.count("/")
    source[0] = _LINK_UP.sub(
        lambda found: f"]({up}{ROOT_PAGES[found[1]]}.md{found[2] or ''})", source[0]
    )


def _from_here(target: str) -> str:
    """Return where a link of a page at the root leads, as seen from docs/."""
    path, mark, anchor = target.partition("#")
    if path in ROOT_PAGES:
        path = f"{ROOT_PAGES[path]}.md"
    else:
        path = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
    return f"{path}{mark}{anchor}"


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", lead_to_the_site)
