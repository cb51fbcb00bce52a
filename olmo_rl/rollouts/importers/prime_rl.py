"""Batches that prime-rl's orchestrator hands to its trainer: msgpack of a `TrainingBatch` (rollouts.bin).

Its structs are written as arrays (`array_like=True`), so fields have positions and no names. `LAYOUTS` holds
the published definitions of `TrainingSample` (PrimeIntellect-ai/prime-rl, src/prime_rl/transport/types.py in
2026, up to 0.8) with the type of every position: a record must fit one of them, anything else is refused.
Where it fits several, a position that they name differently is not read. Trailing defaults may be left out.

prime-rl writes one route row per token; that of the last token belongs to no decision and is dropped. Groups
are not in these files. A list of `MicroBatch` (rank_N.bin, all that later versions write) is refused: its
samples are packed in order of length and carry advantages instead of rewards and groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from olmo_rl.data.columns import converted
from olmo_rl.rollouts.importers.foreign import ForeignSample, ReadOptions, located
from olmo_rl.types import Kind, Refusal, Sampling

OURS = "or read the file with a function of your own: imports.source=package.module.function"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def _is_routes(value: Any) -> bool:
    """[data, shape, dtype], or nested lists [T, L, K]."""
    if not isinstance(value, list):
        return False
    if len(value) == 3 and isinstance(value[0], bytes):
        return _list_of(_is_integer)(value[1]) and isinstance(value[2], str)
    return _list_of(_list_of(_list_of(_is_integer)))(value)


def _is_advantage(value: Any) -> bool:
    """[loss, values, mask], one channel of the later flat form."""
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str)


_INTEGERS, _NUMBERS = _list_of(_is_integer), _list_of(_is_number)
_MASK = _list_of(lambda value: value in (True, False))
_TEXT: Callable[[Any], bool] = lambda value: isinstance(value, str)  # noqa: E731
_MAP = _or_none(lambda value: isinstance(value, Mapping))
_REFS = _or_none(lambda value: isinstance(value, list | Mapping))
_WEIGHTS, _TYPES = _or_none(_NUMBERS), _or_none(_INTEGERS)
_ROUTES, _SCALAR = _or_none(_is_routes), _or_none(_is_number)

Layout = tuple[tuple[str, Callable[[Any], bool]], ...]
_SPLIT: Layout = (
    ("prompt_ids", _INTEGERS),
    ("prompt_mask", _MASK),
    ("completion_ids", _INTEGERS),
    ("completion_mask", _MASK),
    ("completion_logprobs", _NUMBERS),
    ("completion_temperatures", _NUMBERS),
)
_FLAT: Layout = (
    ("token_ids", _INTEGERS),
    ("mask", _MASK),
    ("logprobs", _NUMBERS),
    ("temperatures", _NUMBERS),
    ("env_name", _TEXT),
)
_SCALARS: Layout = (("advantage", _SCALAR), ("reward", _SCALAR))
_MEDIA: Layout = (("mm_kwargs", _MAP), ("routed_experts", _ROUTES), ("mm_token_type_ids", _TYPES))
_STREAMS: Layout = (("rl_weights", _WEIGHTS), ("ce_weights", _WEIGHTS), ("ref_kl_weights", _WEIGHTS))
LAYOUTS: tuple[Layout, ...] = (
    (  # before environments were named
        *_SPLIT,
        ("teacher_logprobs", _WEIGHTS),
        *_SCALARS,
        ("vlm_images", _MAP),
        ("routed_experts", _ROUTES),
        ("mm_token_type_ids", _TYPES),
    ),
    (  # with environments and training modes
        *_SPLIT,
        ("env_name", _TEXT),
        ("teacher_logprobs", _WEIGHTS),
        *_SCALARS,
        *_MEDIA,
        ("training_mode", _TEXT),
        ("mm_refs", _REFS),
    ),
    (  # with weights of loss components per token
        *_SPLIT,
        ("env_name", _TEXT),
        ("ref_logprobs", _WEIGHTS),
        *_SCALARS,
        *_MEDIA,
        *_STREAMS,
        ("token_advantages", _WEIGHTS),
        ("completion_obs_mask", _or_none(_MASK)),
    ),
    (  # one flat sequence, advantages per token, no reward
        *_FLAT,
        ("ref_logprobs", _WEIGHTS),
        ("mm_kwargs", _MAP),
        ("mm_refs", _REFS),
        ("routed_experts", _ROUTES),
        ("mm_token_type_ids", _TYPES),
        *_STREAMS,
        ("advantages", _WEIGHTS),
    ),
    (*_FLAT, ("advantages", _list_of(_is_advantage)), ("reward", _SCALAR), *_MEDIA),  # advantages by loss
)
READ = ("ref_logprobs", "reward", "env_name", "routed_experts", "training_mode", "advantage", "advantages")
MEDIA = ("vlm_images", "mm_kwargs", "mm_refs")


def read_batch(path: Path, *, options: ReadOptions) -> Iterator[ForeignSample]:
    """Every sample of one file."""
    del options  # routes are decoded by the importer
    try:
        batch = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
    except (msgpack.UnpackException, TypeError, ValueError) as error:  # TypeError: a key that has no hash
        raise Refusal(f"{path}: not one whole msgpack value ({error}): is the file cut?") from None
    if isinstance(batch, list) and batch and all(map(_is_micro_batch, batch)):
        raise Refusal(
            f"{path}: a list of MicroBatch, which prime-rl writes as rank_N.bin for its trainer: samples are "
            "packed in order of length and have advantages in place of rewards and groups. Import "
            f"rollouts.bin (TrainingBatch, prime-rl up to 0.8), {OURS}"
        )
    # [examples, step, run_idx]
    if not isinstance(batch, list) or not 2 <= len(batch) <= 3 or not _is_integer(batch[1]):
        raise Refusal(f"{path}: no TrainingBatch [examples, step, run_idx] of prime-rl up to 0.8: {OURS}")
    examples, step = batch[0], batch[1]
    if not isinstance(examples, list):
        raise Refusal(f"{path}: no list of examples: is this a TrainingBatch of prime-rl's orchestrator?")
    for number, example in enumerate(examples):
        where = f"{path} example {number}"
        with located(where):
            sample = _sample(named(example), where=where)
        sample.values["id"] = f"{step}:{number}"
        yield sample


def _is_micro_batch(value: Any) -> bool:
    """[input_ids, ...], where a `TrainingBatch` has a list of examples or a number."""
    return isinstance(value, list) and len(value) > 5 and bool(value[0]) and _INTEGERS(value[0])


def named(example: Any) -> dict[str, Any]:
    """The fields of one `TrainingSample` by name; a position with several possible names has all of them."""
    if not isinstance(example, list):
        raise Refusal(f"{type(example).__name__} instead of the fields of a TrainingSample")
    fitting = [layout for layout in LAYOUTS if _fits(example, layout)]
    if not fitting:
        raise Refusal(
            f"{len(example)} fields that are no TrainingSample of prime-rl up to 0.8 (known are "
            f"{' or '.join(str(len(layout)) for layout in LAYOUTS)} fields, in their order): {OURS}"
        )
    names = [dict.fromkeys(layout[i][0] for layout in fitting) for i in range(len(example))]
    return {" or ".join(name): value for name, value in zip(names, example, strict=True)}


def _fits(example: list[Any], layout: Layout) -> bool:
    needed = len(_FLAT) if layout[0][0] == "token_ids" else len(_SPLIT)
    return needed <= len(example) <= len(layout) and all(
        test(value) for (_, test), value in zip(layout, example, strict=False)
    )


def _sample(fields: Mapping[str, Any], *, where: str) -> ForeignSample:
    mode = fields.get("training_mode", "rl")
    if mode != "rl":
        return ForeignSample(where=where, left_out=f"training_mode {mode}")
    values = _flat(fields) if "token_ids" in fields else _split(fields)
    tokens, generated = values["tokens"], values["response_mask"]
    if not len(tokens) == len(generated) == len(values["behavior_logprobs"]):
        raise Refusal(
            f"{len(tokens)} tokens, {len(generated)} entries of the mask, "
            f"{len(values['behavior_logprobs'])} log-probs"
        )
    if not generated.any():
        return ForeignSample(where=where, left_out="no response")
    routes = fields.get("routed_experts")
    if routes and isinstance(routes[0], bytes):
        routes = {"data": routes[0], "shape": routes[1], "dtype": routes[2]}
    types = fields.get("mm_token_type_ids") or ()  # 0: text
    known = (*(name for name, _ in (*_SPLIT, *_FLAT)), *READ, *MEDIA, "mm_token_type_ids")
    return ForeignSample(
        where=where,
        values=values
        | {
            "ref_logprobs": fields.get("ref_logprobs"),
            "reward": fields.get("reward"),
            "routes": routes,
            "has_placeholders": any(fields.get(name) for name in MEDIA) or any(types),
        },
        sampling=_sampling(fields, generated=generated),
        ignored=[name for name, value in fields.items() if name not in known and value is not None],
    )


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tokens": converted(fields["token_ids"], kind=Kind.tokens, name="token_ids"),
        "response_mask": converted(fields["mask"], kind=Kind.mask, name="mask"),
        "behavior_logprobs": converted(fields["logprobs"], kind=Kind.logprobs, name="logprobs"),
    }


def _split(fields: Mapping[str, Any]) -> dict[str, Any]:
    prompt = converted(fields["prompt_ids"], kind=Kind.tokens, name="prompt_ids")
    response = converted(fields["completion_ids"], kind=Kind.tokens, name="completion_ids")
    logprobs = converted(fields["completion_logprobs"], kind=Kind.logprobs, name="completion_logprobs")
    before = converted(fields["prompt_mask"], kind=Kind.mask, name="prompt_mask")
    behind = converted(fields["completion_mask"], kind=Kind.mask, name="completion_mask")
    for name, values, ids in (("prompt_mask", before, prompt), ("completion_mask", behind, response)):
        if len(values) != len(ids):
            raise Refusal(f"{name} has {len(values)} entries for {len(ids)} tokens")
    if before.any():
        raise Refusal(f"prompt_mask is true at token {int(np.argmax(before))}, which has no log-prob")
    return {
        "tokens": np.concatenate([prompt, response]),
        "response_mask": np.concatenate([before, behind]),
        "behavior_logprobs": np.concatenate([np.zeros(len(prompt), dtype=np.float32), logprobs]),
    }


def _sampling(fields: Mapping[str, Any], *, generated: Any) -> Sampling:
    """The temperature of the generated tokens; prime-rl records no other setting."""
    recorded = fields.get("temperatures", fields.get("completion_temperatures"))
    if not recorded:
        return Sampling()
    drawn = generated[-len(recorded) :]
    if len(drawn) != len(recorded):
        raise Refusal(f"{len(recorded)} temperatures for {len(generated)} tokens")
    found = sorted({float(value) for value, mine in zip(recorded, drawn, strict=True) if mine})
    if len(found) > 1:
        raise Refusal(f"tokens drawn at temperatures {found}: a sample is trained at one")
    return Sampling(temperature=found[0])
