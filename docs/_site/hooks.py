"""Hooks of mkdocs: pages that are in the repository outside of docs/, links to them, and patterns in the navigation."""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
#: Files outside of docs/ by their path in the repository, with their path in the site.
OUTSIDE = {"CHANGELOG.md": "changelog.md", "bench/NOTES.md": "notes.md"}
OUTSIDE |= {
    path.relative_to(ROOT).as_posix(): f"results/{path.name}" for path in (ROOT / "bench/results/h200").glob("*.png")
}
PATHS = {uri: path for path, uri in OUTSIDE.items()}
#: Pages that are not in the site, whose links are checked too.
CHECKED = ("README.md", "third_party/README.md")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)")


#: Warnings below this name are errors in a strict build.
log = logging.getLogger("mkdocs.hooks")


def on_config(config: Any) -> Any:
    for page in CHECKED:
        for target in LINK.findall((ROOT / page).read_text()):
            if not (ROOT / page).parent.joinpath(target.split("#")[0]).exists():
                log.warning("%s contains a link to %s, which does not exist", page, target)
    docs = Path(config.docs_dir)
    for section in config.nav:
        for name, entry in section.items() if isinstance(section, dict) else ():
            if isinstance(entry, str) and "*" in entry:
                section[name] = [path.relative_to(docs).as_posix() for path in sorted(docs.glob(entry))]
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links are written as they are in the repository; here they become those of the site."""
    uri = page.file.src_uri
    folder = posixpath.dirname(PATHS.get(uri, f"docs/{uri}"))

    def relink(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        site = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(site, posixpath.dirname(uri) or '.')}"

    return LINK.sub(relink, markdown)
