"""Rollouts that other programs recorded, read as samples. A reader of your own needs the names here."""

from olmo_rl.rollouts.importers.foreign import ForeignSample, Reader, ReadOptions

__all__ = ["ForeignSample", "ReadOptions", "Reader"]
