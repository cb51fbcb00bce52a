"""GRPO training for Mixture-of-Experts language models: packed rows, replayed routes, planned ranks."""

__version__ = "0.1.0"
