"""Docstrings are plain text with a few marks of reStructuredText; the site renders Markdown."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Makes Markdown of `::` before an indented block and of :func:`name`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^( *)::\n", r"\1\n", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r" ::$", "", text, flags=re.MULTILINE)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            text = re.sub(r"<(\w+)>", r"&lt;\1&gt;", text)
            obj.docstring.value = re.sub(r":func:`(?:dsa_ext\.)?(\w+)`", r"[`\1`][dsa_ext.\1]", text)
