"""The vocabulary: what can be named inside a model, how a name is written, and which positions are meant."""

from interp.points.address import Address
from interp.points.info import Group, ModelInfo
from interp.points.positions import ALL, Positions, Tokens
from interp.points.table import BLOCK_POINTS, POINTS, STREAM_POINTS, Point

__all__ = [
    "ALL",
    "BLOCK_POINTS",
    "POINTS",
    "STREAM_POINTS",
    "Address",
    "Group",
    "ModelInfo",
    "Point",
    "Positions",
    "Tokens",
]
