"""The web pages: `/` shows what is served and lets you try it, `/docs` shows the API. No sockets.

They are plain files in gateway/pages, without a build step and without anything from another host. At the start, the
style sheet and scripts that a page names are put into it. A page is then one answer and needs no other routes, so no
key can open only half of it. The Content-Security-Policy names the page's scripts by hash. Markup that slips into a
page (none should: texts are shown as text nodes) could run nothing, load nothing and send nothing to another host.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent.parent / "pages"
_FILES = {"/": "index.html", "/docs": "docs.html"}

_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')


@dataclass(frozen=True, slots=True)
class Page:
    """A page and its headers, ready to be sent."""

    body: bytes
    headers: dict[str, str]


def load() -> dict[str, Page]:
    """All pages by path. It reads files, so call it once, at the start."""
    return {path: _page((_FOLDER / name).read_text(encoding="utf-8")) for path, name in _FILES.items()}


def _page(html: str) -> Page:
    styles = [(_FOLDER / name).read_text(encoding="utf-8") for name in _STYLE.findall(html)]
    scripts = [(_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPT.findall(html)]
    inline = iter([*styles, *scripts])
    # The replacement is a function, because a backslash in a replacement string is an escape.
    html = _STYLE.sub(lambda _: f"<style>{next(inline)}</style>", html)
    html = _SCRIPT.sub(lambda _: f"<script>{next(inline)}</script>", html)
    policy = (
        "default-src 'none'",
        f"script-src {' '.join(map(_source, scripts))}",
        f"style-src {' '.join(map(_source, styles))}",
        "connect-src 'self'",
        "img-src data:",  # the icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # after an upgrade, an old page must not talk to the new server
    }
    return Page(html.encode(), headers)


def _source(text: str) -> str:
    """The name of an inline text in a policy. Source: Content Security Policy Level 3, hash-source."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
