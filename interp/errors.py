"""What can go wrong, in sentences for the person who reads them."""


class InterpError(Exception):
    """Base class of every error that `interp` raises on purpose."""


class UserError(InterpError):
    """The input cannot be used as given; commands print the sentence and exit with status 2."""


class PointRefused(InterpError):
    """A point does not exist on this model or its equation does not hold there; the message says why."""
