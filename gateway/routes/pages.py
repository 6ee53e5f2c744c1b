"""The pages for people: `/` shows what is served and lets one try it, `/docs` is the API in words. No sockets.

They are plain files in gateway/pages, without a build step or anything from another host. The style sheet and the
scripts that a page names are put into it once, at the start: a page is then one answer, needs no routes beyond its own,
and no key opens half of it. What a page may run is said by hash in its Content-Security-Policy, so that markup which
slipped into it (none should: texts are shown as text nodes) would still run nothing, load nothing and send nothing
elsewhere.
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
    """A page as it is sent."""

    body: bytes
    headers: dict[str, str]


def load() -> dict[str, Page]:
    """Every page by its path. Reads files: call once, at the start."""
    return {path: _page((_FOLDER / name).read_text(encoding="utf-8")) for path, name in _FILES.items()}


def _page(html: str) -> Page:
    styles = [(_FOLDER / name).read_text(encoding="utf-8") for name in _STYLE.findall(html)]
    scripts = [(_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPT.findall(html)]
    inline = iter([*styles, *scripts])
    # By a function: in a replacement text a backslash would mean something.
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
        "Cache-Control": "no-cache",  # after an upgrade the old page must not ask the new server
    }
    return Page(html.encode(), headers)


def _source(text: str) -> str:
    """What a Content-Security-Policy calls this inline text. Source: Content Security Policy Level 3, hash-source."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
