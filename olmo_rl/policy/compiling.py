"""torch.compile by region: the compiled methods of a block, their varying shapes, and a log of graphs.

A region is a method marked with `@region` that takes and returns tensors only. Document boundaries never
enter one: what walks documents (attention kernels, delta rule, short convolution) and what needs sizes on the
host (dispatch of tokens to experts) runs between regions, so neither the number of documents nor the longest
one can specialise a graph. Every region is one whole graph (`fullgraph`): a part that cannot be compiled is
an error, not a slow path. A region calls no other region. FSDP gathers weights in hooks around a module's
call, therefore a region never calls a submodule that is gathered on its own (`keep_float32`); such a module's
own `forward` is the region.

Refused: nothing here; `refusals` and `backends.missing` judge the configuration and the machine.

Shapes: dimension 0 of every argument of a region is the number of tokens of the row, free to change, unless
the region sets another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Method = TypeVar("Method", bound=Callable[..., Any])
Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]

_MARK = "_region_rows"
_GRAPHS_PER_REGION = 16  # far above what layers and shapes need; more is an error that names the region
_REMEMBERED = 4096  # compilations that torch keeps the reasons of


def region(*, rows: int = 0) -> Callable[[Method], Method]:
    """Mark a method as a region. `rows` = 0: every tensor argument has the row's tokens in dimension 0, a
    number that is fixed or varies, yet is never 0 or 1 by nature. `rows` = n > 0: the first n arguments have
    rows in dimension 0 whose number depends on data and may be anything, the others have fixed shapes.
    """

    def mark(method: Method) -> Method:
        method.__dict__[_MARK] = rows
        return method

    return mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """One compilation: the region as file.method, and why no earlier graph would do."""

    region: str
    reason: str


class GraphLog:
    """Graphs that torch.compile compiled in this process after this object was made, from torch's records."""

    def __init__(self) -> None:
        torch._dynamo.utils.set_compilation_metrics_limit(_REMEMBERED)
        self.total = 0
        self._seen = max((record.start_time_us or 0 for record in _records()), default=0)

    def new(self) -> list[Graph]:
        """The compilations since the last call, in order."""
        fresh = [record for record in _records() if (record.start_time_us or 0) > self._seen]
        self._seen = max((record.start_time_us or 0 for record in fresh), default=self._seen)
        self.total += len(fresh)
        return [
            Graph(
                region=f"{PurePath(record.co_filename or '').stem}.{record.co_name}",
                reason=(record.recompile_reason or "first use").splitlines()[0],
            )
            for record in fresh
        ]


def _records() -> list[Any]:
    """Torch's records of forward graphs; the backward of a graph is no graph of its own here."""
    records = torch._dynamo.utils.get_compilation_metrics()
    return [record for record in records if record.co_name is not None and record.is_forward]


def compile_regions(model: nn.Module, *, static_rows: bool, backend: str | Backend = "inductor") -> int:
    """Compile every region of `model` in place and return their number; nothing compiles before it runs. Call
    it after sharding. `static_rows`: all rows have one length (`packing.pad_to_budget`), graphs may be
    specialised for it.
    """
    torch._dynamo.config.recompile_limit = _GRAPHS_PER_REGION
    regions = 0
    for module in model.modules():
        for name, method in inspect.getmembers(type(module), inspect.isfunction):
            rows = method.__dict__.get(_MARK)
            if rows is not None:
                compiled = torch.compile(method.__get__(module), fullgraph=True, backend=backend)
                setattr(module, name, partial(_run, compiled, rows, static_rows))
                regions += 1
    return regions


def _run(compiled: Callable[..., Any], rows: int, static_rows: bool, *arguments: Any) -> Any:
    """Call a compiled region, its tensors marked by what may vary: in rows of one length only what is not the
    row (routes of its pads).
    """
    for tensor in arguments[: rows or None]:
        if not isinstance(tensor, Tensor):
            continue
        if rows:
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        elif not static_rows or len(tensor) != len(arguments[0]):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return compiled(*arguments)
