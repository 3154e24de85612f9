"""One thin module per command: a dataclass whose fields are the flags, and a function that runs it."""
