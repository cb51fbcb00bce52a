"""Functions that a user names by import path: loaded once, refused by key where they cannot be."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, cast

from olmo_rl.types import Refusal


def load(path: str, *, key: str, takes: str) -> Callable[..., Any]:
    """The function at `package.module:function`. `takes` describes its arguments and result in a refusal.

    Raises Refusal, naming `key`, where the module does not import or has no such function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise Refusal(f"{key}={path}: not an import path: give package.module:function, {takes}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise Refusal(
            f"{key}={path}: {module_name} does not import ({error}): install it, or put its folder on "
            "PYTHONPATH"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise Refusal(f"{key}={path}: {module_name} has no function {name}: it has to be {takes}")
    return cast(Callable[..., Any], function)


def load_surrogate(path: str) -> Callable[..., Any]:
    """The policy objective at `loss.surrogate`. Raises Refusal, also where it takes other arguments."""
    function = load(path, key="loss.surrogate", takes="an olmo_rl.policy.loss.SurrogateFunction")
    named = dict.fromkeys(("log_ratio", "advantages", "slots", "config"))
    try:
        inspect.signature(function).bind("logprobs", **named)
    except TypeError as error:
        raise Refusal(
            f"loss.surrogate={path}: called (logprobs, *, {', '.join(named)}): {error}: take these arguments"
        ) from None
    return function
