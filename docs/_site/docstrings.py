"""Docstrings are plain text with a few marks of reStructuredText; the site renders Markdown."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Makes Markdown of `::` before an indented block, of :func:`name`, and of :meth:`name` in the same class."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^( *)::\n", r"\1\n", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r" ::$", "", text, flags=re.MULTILINE)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            text = re.sub(r"<(\w+)>", r"&lt;\1&gt;", text)
            text = re.sub(r":func:`(?:dsa_ext\.)?(\w+)`", r"[`\1`][dsa_ext.\1]", text)
            owner = obj if obj.is_class else obj.parent
            if owner is not None:
                text = re.sub(r":meth:`(\w+)`", rf"[`\1`][{owner.path}.\1]", text)
            obj.docstring.value = text
