"""Functions that a user names by import path: loaded once, refused by key where they cannot be."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from olmo_rl.types import Interrupted, Refusal


def import_parts(path: object) -> tuple[str, str] | None:
    """Module and name of an import path, `package.module.name`, or `package.module:name` as other programs
    have it; None where it is neither.
    """
    module, _, name = str(path).replace(":", ".", 1).rpartition(".")
    words = [*module.split("."), name]
    return (module, name) if isinstance(path, str) and module and all(map(str.isidentifier, words)) else None


def load(path: str, *, key: str, takes: str) -> Callable[..., Any]:
    """The function at `package.module.function`. `takes` describes its arguments and result in a refusal.

    Raises Refusal, naming `key`, where the module does not import or has no such function.
    """
    parts = import_parts(path)
    if parts is None:
        raise Refusal(f"{key}={path}: not an import path: give package.module.function, {takes}")
    module_name, name = parts
    function = getattr(imported(module_name, where=f"{key}={path}"), name, None)
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


def imported(module: str, *, where: str) -> ModuleType:
    """The user's module. Raises Refusal, beginning with `where`, for whatever happens at its import, with the
    line at fault.
    """
    try:
        return importlib.import_module(module)
    except (Interrupted, KeyboardInterrupt):
        raise
    except ImportError as error:
        raise Refusal(
            f"{where}: {module} does not import ({error}): correct it, put the module beside train.py, or "
            "its folder on PYTHONPATH"
        ) from None
    except BaseException as failure:  # a module may raise anything, or end the program
        file, line = _place(failure)
        raise Refusal(
            f"{where}: {module} does not import ({type(failure).__name__}: {failure}): correct {file}, "
            f"line {line}"
        ) from None


def _place(failure: BaseException) -> tuple[str | None, int | None]:
    """File and line where an import failed: the last line at the top level of a module, which no hook of
    another library hides, such as one on sys.exit; of a syntax error, those of the text.
    """
    if isinstance(failure, SyntaxError):
        return failure.filename, failure.lineno
    frames = traceback.extract_tb(failure.__traceback__)
    last = next((frame for frame in reversed(frames) if frame.name == "<module>"), frames[-1])
    return last.filename, last.lineno
