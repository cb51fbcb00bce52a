"""Debug dumps of slime and miles: `torch.save({"rollout_id", "samples": [Sample.to_dict(), ...]})`.

Fields of `Sample` as in slime (THUDM/slime, slime/utils/types.py at 7985bf2 and 0d234f3; later `rollout_id`
and the fields of top-p replay) and miles (radixark/miles, miles/utils/types.py at 002ce70): `tokens` over
prompt and response; `loss_mask` and `rollout_log_probs` over the response; `rollout_routed_experts` [T-1,
layers, top_k]. Files are read with `weights_only=True`: a file that would need to run code is refused. A
token of the response whose loss_mask is 0 was not generated (a tool's answer), as both programs use it;
`remove_sample` masks the whole response instead. Samples that were cut out of one trajectory share `index`
and `rollout_id`: each is a sample of its own.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from olmo_rl.data.columns import converted
from olmo_rl.rollouts.importers.foreign import (
    ForeignSample,
    ReadOptions,
    behind_prompt,
    located,
    text_of,
    unknown_fields,
)
from olmo_rl.rollouts.versions import version_of
from olmo_rl.types import Kind, Refusal

READ = (
    "tokens",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "rollout_routed_experts",
    "rollout_top_p_token_ids",
    "group_index",
    "index",
    "rollout_id",
    "reward",
    "status",
    "weight_versions",
    "remove_sample",
    "prompt",
    "response",
    "multimodal_inputs",
    "multimodal_train_inputs",
)
EXPECTED = (  # in every dump, and not needed for training
    "raw_prompt",
    "label",
    "metadata",
    "generate_function_path",
    "train_metadata",
    "session_id",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
    "teacher_log_probs",
    "mopd_teacher_log_probs",
    "rollout_top_p_token_offsets",
)
# Whatever the unpickler meets first in a file whose bytes were cut or changed.
_DAMAGED = (
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
FINISHED = {"completed": "stop", "truncated": "length"}


def read_dump(path: Path, *, options: ReadOptions) -> Iterator[ForeignSample]:
    """Every sample of one .pt file."""
    del options  # routes are decoded by the importer
    dump = _load(path)
    samples = dump.get("samples") if isinstance(dump, Mapping) else dump
    if not isinstance(samples, list):
        raise Refusal(f"{path}: no list of samples: is this a dump of --save-debug-rollout-data?")
    rollout = dump.get("rollout_id") if isinstance(dump, Mapping) else None
    siblings: Counter[tuple[Any, Any]] = Counter()
    for number, record in enumerate(samples):
        where = f"{path} sample {number}"
        with located(where):
            if not isinstance(record, Mapping):
                raise Refusal(f"{type(record).__name__} instead of the fields of a sample")
            sample = _sample(record, where=where)
            trajectory = (_id(record, name="index"), _id(record, name="rollout_id"))
        if trajectory[0] is not None:
            name = trajectory[0] if rollout is None else f"{rollout}:{trajectory[0]}"
            later = siblings[trajectory] if trajectory[1] is not None else 0
            sample.values["id"] = f"{name}.{later}" if later else name
            siblings[trajectory] += 1
        yield sample


def _load(path: Path) -> Any:
    """The dump, through an unpickler that builds arrays and plain values and calls nothing else."""
    dtypes = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "?")
    types: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(name)) for name in dtypes)]
    builders: tuple[Any, ...] = (np.empty(0).__reduce__()[0], np.float32(0).__reduce__()[0])
    for rebuild in builders:
        # NumPy 1 wrote the same functions under the module's old name.
        types += [rebuild, (rebuild, f"numpy.core.multiarray.{rebuild.__name__}")]
    try:
        with path.open("rb") as file, torch.serialization.safe_globals(types):
            if (changed := _changed_record(file)) is not None:
                raise Refusal(f"{path}: {changed} differs from its checksum: copy the file again")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Refusal:
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).strip().split("\n")[0]
        raise Refusal(
            f"{path}: the file needs more than plain values and arrays to be read, which could run its "
            f"author's code ({reason}): save samples as dictionaries (Sample.to_dict)"
        ) from None
    except _DAMAGED as error:
        raise Refusal(f"{path}: not a file of torch.save, or a cut one ({error})") from None


def _changed_record(file: BinaryIO) -> str | None:
    """The record of a file of torch.save whose checksum is wrong, which torch reads without a look at it;
    None where all agree, and for the older form, which is no archive.
    """
    if not zipfile.is_zipfile(file):
        file.seek(0)
        return None
    with zipfile.ZipFile(file) as archive:
        written = any(record.CRC for record in archive.infolist())  # torch can leave checksums out
        changed = archive.testzip() if written else None
    file.seek(0)
    return changed


def _sample(record: Mapping[str, Any], *, where: str) -> ForeignSample:
    status = str(record.get("status", "completed"))
    tokens = converted(record.get("tokens", []), kind=Kind.tokens, name="tokens")
    length = record.get("response_length")
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= len(tokens):
        raise Refusal(f"response_length is {length!r} for {len(tokens)} tokens")
    if length == 0:
        return ForeignSample(where=where, left_out=f"status {status}, no response")
    if status not in FINISHED:
        return ForeignSample(where=where, left_out=f"status {status}")
    if record.get("rollout_log_probs") is None:
        raise Refusal(
            "no rollout_log_probs: training needs the log-probs of the engine; record them "
            "(--use-rollout-logprobs or its like)"
        )
    if record.get("rollout_top_p_token_ids") is not None:
        raise Refusal(
            "rollout_top_p_token_ids: tokens were drawn from a truncated nucleus, and their log-probs are of "
            "that distribution: generate with top_p=1"
        )
    removed = record.get("remove_sample")
    removed = removed is not None and converted(removed, kind=Kind.flag, name="remove_sample")
    generated = _over_response(record, name="loss_mask", kind=Kind.mask, length=length)
    if generated is None or (removed and not generated.any()):
        generated = np.ones(length, dtype=bool)
    logprobs = _over_response(record, name="rollout_log_probs", kind=Kind.logprobs, length=length)
    assert logprobs is not None, "checked above"
    count = len(tokens)
    return ForeignSample(
        where=where,
        values={
            "group": record.get("group_index"),
            "tokens": tokens,
            "response_mask": behind_prompt(generated, tokens=count, fill=False),
            "loss_mask": np.zeros(count, dtype=bool) if removed else None,
            "behavior_logprobs": behind_prompt(logprobs, tokens=count, fill=0.0),
            "reward": record.get("reward"),
            "routes": record.get("rollout_routed_experts"),
            "policy_version": _oldest(record.get("weight_versions")),
            "finish_reason": FINISHED[status],
            "prompt": text_of(record.get("prompt")),
            "response": text_of(record.get("response")),
            "has_placeholders": any(
                record.get(name) is not None and len(record[name]) > 0
                for name in ("multimodal_inputs", "multimodal_train_inputs")
            ),
        },
        ignored=unknown_fields(record, known=(*READ, *EXPECTED)),
    )


def _id(record: Mapping[str, Any], *, name: str) -> str | None:
    value = record.get(name)
    return None if value is None else str(converted(value, kind=Kind.name, name=name))


def _over_response(record: Mapping[str, Any], *, name: str, kind: Kind, length: int) -> NDArray[Any] | None:
    """A per-token list over the response [response_length], None where the record has none."""
    if record.get(name) is None:
        return None
    values: NDArray[Any] = converted(record[name], kind=kind, name=name)
    if len(values) != length:
        raise Refusal(f"{name} has {len(values)} entries, response_length is {length}")
    return values


def _oldest(versions: Any) -> int | None:
    """The oldest weights that generated part of this sample."""
    if not isinstance(versions, list) or not versions:
        return None
    known = [version_of(version) for version in versions]
    return None if None in known else min(v for v in known if v is not None)
