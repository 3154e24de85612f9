"""Other tools' names for the places that an Address names."""

from interp.names.table import TOOLS, names_of, point_of

__all__ = ["TOOLS", "names_of", "point_of"]
