"""How a graph leaves the house: files that a person opens."""
