"""Other tools' names for the places that an Address names."""

from interp.names.answer import Answer, NameRefused, Spelling
from interp.names.layout import Layout
from interp.names.translate import TOOLS, meanings, names_of, point_of, read, spell

__all__ = ["TOOLS", "Answer", "Layout", "NameRefused", "Spelling", "meanings", "names_of", "point_of", "read", "spell"]
