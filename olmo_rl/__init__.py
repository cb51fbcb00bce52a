"""GRPO training for Mixture-of-Experts language models: packed rows, replayed routes, planned ranks."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["compose", "run", "train"]

if TYPE_CHECKING:
    from olmo_rl.library import compose, run, train


def __getattr__(name: str) -> Any:
    """The functions of olmo_rl.library, imported on first use."""
    if name in __all__:
        from olmo_rl import library

        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
