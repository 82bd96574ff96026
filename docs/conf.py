"""How the pages become a site: ``make docs``. Nothing of it needs a network."""

from __future__ import annotations

import posixpath
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
#: Code with an ellipsis for what is left out; that blocks are code is a test's to say.
suppress_warnings = ["misc.highlighting_failure"]
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

#: Pages outside of docs/ that are part of the site, by the page of the site that stands for each.
ELSEWHERE = {
    "README.md": "readme",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security-policy",
    **{
        str(page.relative_to(HERE.parent)): f"examples/{page.parent.name}"
        for page in sorted(HERE.parent.glob("examples/*/README.md"))
    },
    "examples/README.md": "examples/index",
}
_STANDS_FOR = {page: name for name, page in ELSEWHERE.items()}
#: A link to something in the repository.
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#]+)(#[^)]*)?\)")


def lead_to_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Have links, which are right for who reads files, lead to the pages of the site.

    What stands for a page outside of docs/ is that page itself.
    """
    name = _STANDS_FOR.get(docname)
    if name is None:
        name = f"docs/{docname}.md"
    else:
        app.env.note_dependency(str(HERE.parent / name))
        source[0] = (HERE.parent / name).read_text(encoding="utf-8")
    folder, here = posixpath.dirname(name), posixpath.dirname(f"docs/{docname}")

    def lead(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        if target in ELSEWHERE:
            target = f"docs/{ELSEWHERE[target]}.md"
        return f"]({posixpath.relpath(target, here)}{found[2] or ''})"

    source[0] = _LINK.sub(lead, source[0])


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", lead_to_the_site)
