"""Check the built site: links, pictures and headings that are not there, pages that the navigation leaves out.

    python -m scripts.check_site [FOLDER]

Zensical's own strict mode sees links between pages alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


SITE = Path(__file__).resolve().parents[1] / "build" / "site"
POINTING = {"a": "href", "img": "src", "link": "href", "script": "src", "iframe": "src"}


class Page(HTMLParser):
    """Reader of one page: what it points at, what can be pointed at in it, and what its navigation lists."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.listed: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if address := values.get(POINTING.get(tag, "")):
            self.links.append((tag, address))
        if tag == "a" and "md-nav__link" in values.get("class", ""):
            self.listed.add(values.get("href", ""))


def faults(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, each part loaded from elsewhere, and each page not listed."""
    site, read = site.resolve(), cache(Page)
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]  # has addresses of a server
    found = [f"{path.relative_to(site)}: {fault}" for path in pages for fault in _dead_ends(path, read)]
    listed = {site / urlsplit(address).path for address in read(site / "index.html").listed}
    return found + [f"{path.relative_to(site)}: not listed in mkdocs.yml" for path in pages if path not in listed]


def _dead_ends(path: Path, read: Callable[[Path], Page]) -> Iterator[str]:
    for tag, address in read(path).links:
        parts = urlsplit(address)
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if parts.scheme or parts.netloc:
            if tag != "a":
                yield f"loads {address}"
        elif not target.is_file() and not (target / "index.html").is_file():
            yield f"{address} is not there"
        elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).anchors:
            yield f"{address}: no such heading"


def main() -> None:
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    if found := faults(site):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
