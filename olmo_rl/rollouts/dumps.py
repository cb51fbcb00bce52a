"""Debug dumps of slime and miles: `torch.save({"rollout_id", "samples": [Sample.to_dict(), ...]})`.

Fields as in slime 0.2 and miles 0.2 (`Sample.to_dict` of either): `tokens` over prompt and response,
`response_length`, `loss_mask` and `rollout_log_probs` over the response, `rollout_routed_experts` [T-1,
layers, top_k], `group_index`, `index`, `reward` (a number or a mapping), `status`, `weight_versions`,
`remove_sample`. Files are read with `weights_only=True`: what would need to run code is refused. A token of
the response whose loss_mask is 0 was not generated (a tool's answer), which is how both systems use it;
`remove_sample` masks the whole response instead.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from olmo_rl.rollouts.found import (
    FoundSample,
    behind_prompt,
    mask,
    nothing,
    number_of,
    numbers,
    text_of,
    token_ids,
    unknown_fields,
)
from olmo_rl.rollouts.wire import RouteAxis, decode_routes, version_of
from olmo_rl.types import Refusal

READ = (
    "tokens",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "rollout_routed_experts",
    "group_index",
    "index",
    "reward",
    "status",
    "weight_versions",
    "remove_sample",
    "prompt",
    "response",
    "multimodal_inputs",
    "multimodal_train_inputs",
)
EXPECTED = (  # there in every dump, and nothing that training needs
    "label",
    "metadata",
    "generate_function_path",
    "train_metadata",
    "session_id",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
    "teacher_log_probs",
)
FINISHED = {"completed": "stop", "truncated": "length"}


def read_dump(path: Path, *, axis: RouteAxis | None, reward_key: str | None) -> Iterator[FoundSample]:
    """Every sample of one .pt file."""
    dump = _load(path)
    samples = dump.get("samples") if isinstance(dump, Mapping) else dump
    if not isinstance(samples, list):
        raise Refusal(f"{path}: no list of samples: is this a dump of --save-debug-rollout-data?")
    rollout = dump.get("rollout_id") if isinstance(dump, Mapping) else None
    for number, record in enumerate(samples):
        where = f"{path} sample {number}"
        if not isinstance(record, Mapping):
            raise Refusal(f"{where}: {type(record).__name__} instead of the fields of a sample")
        yield _sample(record, where=where, rollout=rollout, axis=axis, reward_key=reward_key)


def _load(path: Path) -> Any:
    """The dump, through an unpickler that builds arrays and plain values and calls nothing else."""
    dtypes = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "?")
    types: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(name)) for name in dtypes)]
    builders: tuple[Any, ...] = (np.empty(0).__reduce__()[0], np.float32(0).__reduce__()[0])
    for rebuild in builders:
        # NumPy 1 wrote the same functions under the module's old name.
        types += [rebuild, (rebuild, f"numpy.core.multiarray.{rebuild.__name__}")]
    try:
        with torch.serialization.safe_globals(types):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().split("\n")[0]
        raise Refusal(
            f"{path}: the file needs more than plain values and arrays to be read, which could run its "
            f"author's code ({reason}): save samples as dictionaries (Sample.to_dict)"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise Refusal(f"{path}: not a file of torch.save, or a cut one ({error})") from None


def _sample(
    record: Mapping[str, Any], *, where: str, rollout: Any, axis: RouteAxis | None, reward_key: str | None
) -> FoundSample:
    status = str(record.get("status", "completed"))
    tokens = token_ids(record.get("tokens", []), name="tokens", where=where)
    length = record.get("response_length")
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= len(tokens):
        raise Refusal(f"{where}: response_length is {length!r} for {len(tokens)} tokens")
    if length == 0:
        return nothing(where, reason=f"status {status}, no response")
    if status not in FINISHED:
        return nothing(where, reason=f"status {status}")
    lacks = [name for name in ("rollout_log_probs", "reward") if record.get(name) is None]
    if "rollout_log_probs" in lacks:
        raise Refusal(
            f"{where}: no rollout_log_probs: without what the engine said there is nothing to correct or "
            "check against; record them (--use-rollout-logprobs or its like)"
        )
    generated = np.ones(length, dtype=bool)
    if record.get("loss_mask") is not None:
        generated = mask(record["loss_mask"], name="loss_mask", where=where)
        if len(generated) != length:
            raise Refusal(f"{where}: loss_mask has {len(generated)} entries, response_length is {length}")
    removed = bool(record.get("remove_sample"))
    if removed:
        generated = np.ones(length, dtype=bool)
    logprobs = numbers(record["rollout_log_probs"], name="rollout_log_probs", where=where)
    if len(logprobs) != length:
        raise Refusal(f"{where}: rollout_log_probs has {len(logprobs)} entries, response_length is {length}")
    version = _oldest(record.get("weight_versions"))
    if version is None:
        lacks.append("weight_versions")
    routes, surplus = None, 0
    recorded = record.get("rollout_routed_experts")
    if axis is not None and recorded is not None:
        recorded = recorded.numpy() if isinstance(recorded, torch.Tensor) else recorded
        routes = decode_routes(recorded, axis=axis, rows=len(tokens) - 1, where=where)
        surplus = int(len(routes) == len(tokens))
        routes = routes[: len(tokens) - 1]
    elif axis is not None:
        lacks.append("rollout_routed_experts")
    count, name = len(tokens), "loss_mask"
    return FoundSample(
        where=where,
        id=_id(record.get("index"), rollout=rollout),
        group=None if record.get("group_index") is None else str(record["group_index"]),
        tokens=tokens,
        response_mask=behind_prompt(generated, tokens=count, fill=False, name=name, where=where),
        loss_mask=np.zeros(count, dtype=bool) if removed else None,
        logprobs=behind_prompt(logprobs, tokens=count, fill=0.0, name="rollout_log_probs", where=where),
        reward=number_of(record.get("reward"), key=reward_key, name="reward", where=where),
        routes=routes,
        surplus_rows=surplus,
        policy_version=version,
        finish_reason=FINISHED[status],
        prompt=text_of(record.get("prompt")),
        response=text_of(record.get("response")),
        has_placeholders=any(record.get(n) for n in ("multimodal_inputs", "multimodal_train_inputs")),
        lacks=lacks,
        ignored=unknown_fields(record, known=(*READ, *EXPECTED)),
    )


def _id(index: Any, *, rollout: Any) -> str | None:
    """`index` counts over the whole run; a dump of its own rollout keeps ids apart anyway."""
    if index is None:
        return None
    return str(index) if rollout is None else f"{rollout}:{index}"


def _oldest(versions: Any) -> int | None:
    """The oldest weights that generated part of this sample."""
    if not isinstance(versions, list) or not versions:
        return None
    known = [version_of(version) for version in versions]
    return None if None in known else min(v for v in known if v is not None)
