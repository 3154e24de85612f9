"""The vocabulary: what can be named inside a model, and how a name is written."""

from interp.points.address import Address
from interp.points.info import ModelInfo
from interp.points.table import BLOCK_POINTS, POINTS, STREAM_POINTS, Point

__all__ = ["BLOCK_POINTS", "POINTS", "STREAM_POINTS", "Address", "ModelInfo", "Point"]
