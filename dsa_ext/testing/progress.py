"""A progress bar for programs that run for a while."""

import sys


class Progress:
    """Redraws one line on a terminal; elsewhere prints one line per new label, so that logs stay readable."""

    def __init__(self, total: int, width: int = 30) -> None:
        self._total, self._width = total, width
        self._done, self._label = 0, ""

    def step(self, label: str) -> None:
        """Counts one more of the `total` steps as done."""
        self._done += 1
        filled = self._width * self._done // self._total
        bar = f"[{'#' * filled:{self._width}}] {100 * self._done // self._total:3d} %  {label}"
        if sys.stderr.isatty():
            end = "\n" if self._done == self._total else ""
            print(f"\r{bar:<100.100}", end=end, file=sys.stderr, flush=True)
        elif label != self._label:
            print(bar, file=sys.stderr, flush=True)
        self._label = label
