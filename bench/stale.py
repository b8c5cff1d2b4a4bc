"""Lists the results whose kernels have changed since they were measured; fails if there are any.

A result names its operators and the hash of their kernels, kernels_sha256. The hash covers the source that registers an
operator, the files of csrc/ that it includes, and the sources in the folder of an included header that include it too,
since they define what it declares. So a change in the files of another operator makes no result stale. In doubt a
result is called stale.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
RESULTS = ROOT / "bench" / "results" / "h200"

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*\n?', re.MULTILINE)
REGISTRATION = re.compile(r'\bm\.impl\(\s*"(\w+)"')


class Kernels:
    """The files of csrc/ by operator."""

    def __init__(self, csrc: Path = CSRC) -> None:
        self._texts = {path: path.read_text() for path in sorted(csrc.resolve().rglob("*")) if path.is_file()}
        self._includes = {path: set(self._included(path, csrc.resolve())) for path in self._texts}
        sources = [path for path in self._texts if path.suffix in (".cpp", ".cu")]
        self._registered = {op: path for path in sources for op in REGISTRATION.findall(self._texts[path])}
        defining = [path for path in sources if path not in self._registered.values()]
        #: For each file, the sources in its folder that include it, directly or indirectly.
        self._definitions = {
            path: {source for source in defining if source.parent == path.parent and path in self._reach(source)}
            for path in self._texts
        }

    @property
    def operators(self) -> list[str]:
        return sorted(self._registered)

    def files(self, operator: str) -> set[Path]:
        if operator not in self._registered:
            raise LookupError(f"no file of csrc/ registers the operator {operator}")
        return self._reach(self._registered[operator], self._definitions)

    def sha256(self, operators: Iterable[str]) -> str:
        """Hash over each file of the operators in sorted order: base name, NUL, contents without the lines that include
        other files of csrc/. So it does not change if files are moved."""
        files = set().union(*map(self.files, operators))
        digest = hashlib.sha256()
        for name, text in sorted((path.name, INCLUDE.sub("", self._texts[path])) for path in files):
            digest.update(f"{name}\0{text}".encode())
        return digest.hexdigest()

    def _included(self, path: Path, csrc: Path) -> Iterator[Path]:
        for name in INCLUDE.findall(self._texts[path]):
            for candidate in ((folder / name).resolve() for folder in (path.parent, csrc)):
                if candidate in self._texts:
                    yield candidate
                    break

    def _reach(self, start: Path, definitions: dict[Path, set[Path]] | None = None) -> set[Path]:
        """`start` and all files that it includes, directly or indirectly. With `definitions`, for each of these files
        also the sources that define it, and what they reach."""
        reached: set[Path] = set()
        waiting = {start}
        while waiting:
            path = waiting.pop()
            reached.add(path)
            waiting |= self._includes[path] | (definitions or {}).get(path, set())
            waiting -= reached
        return reached


def stale_results(kernels: Kernels, folder: Path) -> list[str]:
    """The names of the result files whose kernels differ from the current ones."""

    def is_current(result: dict[str, str]) -> bool:
        try:
            return kernels.sha256(result["operators"]) == result["kernels_sha256"]
        except (KeyError, LookupError):
            return False

    return [path.name for path in sorted(folder.glob("*.json")) if not is_current(json.loads(path.read_text()))]


def main(csrc: Path = CSRC, results: Path = RESULTS) -> int:
    stale = stale_results(Kernels(csrc), results)
    for name in stale:
        print(f"{name}: its kernels have changed since it was measured")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
