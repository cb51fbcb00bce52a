"""The checks that a recorded sample passes before anything trains on it; `files.py` owns the formats.

Every check raises Refusal with the position, layer or row at fault; the reader adds file, line and sample id.
Nothing is repaired: no array is padded or cut, no route is replaced. NumPy only, and vectorised, because a
collection holds hundreds of millions of expert ids.

Shapes: T tokens of one sample, L routed layers, K experts per token; routes [T-1, L, K].
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from olmo_rl.types import FIELDS, Collection, ExpertLayout, Kind, Refusal, Sample, Sampling

# Above 0 by the rounding of bfloat16 at most.
LARGEST_LOGPROB = 0.1
# A sampled token is likelier, and sums over a response stay far within float32.
LOWEST_LOGPROB = -1e4
# Advantages are float32, and without normalisation as large as rewards: their sums over a step stay finite.
LARGEST_REWARD = 1e30
_LARGEST_TOKEN = np.iinfo(np.int32).max
# Ids per block of the route checks: a block and its scratch stay in the processor's cache.
_BLOCK_IDS = 1 << 18


def check_sample(sample: Sample, *, vocab_size: int | None = None) -> None:
    """Refuse a sample whose arrays do not describe the same tokens, or hold values that cannot be trained on.

    A response mask that is false everywhere is legal: such a sample has nothing to train on and counts
    nowhere.
    """
    length = len(sample)
    if length == 0:
        raise Refusal("tokens is empty: a sample has at least one token, remove it")
    _check_aligned(sample, length)
    check_tokens(sample.tokens, vocab_size=vocab_size)
    if sample.loss_mask is not None:
        stray = sample.loss_mask & ~sample.response_mask
        if stray.any():
            raise Refusal(
                f"loss_mask is true at position {_first(stray)} where response_mask is false: only tokens "
                "that the policy generated can be trained"
            )
    for entry in FIELDS:
        if entry.kind is Kind.logprobs and (values := getattr(sample, entry.name)) is not None:
            _check_logprobs(values, name=entry.name, active=sample.scored)
    if not np.isfinite(sample.reward):
        raise Refusal(
            f"reward is {sample.reward}: a failed reward call must be repaired or its sample left out"
        )
    if abs(sample.reward) > LARGEST_REWARD:
        raise Refusal(
            f"reward is {sample.reward:g}: advantages of such rewards overflow float32, the largest is "
            f"{LARGEST_REWARD:g}: scale rewards down"
        )
    if sample.policy_version < 0:
        raise Refusal(f"policy_version is {sample.policy_version}: it counts optimizer steps, from 0")


def _check_aligned(sample: Sample, length: int) -> None:
    for entry in FIELDS:
        values = getattr(sample, entry.name)
        if entry.kind.per_token and values is not None and len(values) != length:
            raise Refusal(
                f"{entry.name} has {len(values)} entries, tokens has {length}: "
                "per-token arrays are neither padded nor cut"
            )


def check_tokens(tokens: NDArray[np.integer], *, vocab_size: int | None) -> None:
    """Refuse token ids outside of the vocabulary, or of int32 where none is given."""
    limit = _LARGEST_TOKEN + 1 if vocab_size is None else vocab_size
    bad = (tokens < 0) | (tokens >= limit)
    if bad.any():
        t = _first(bad)
        raise Refusal(
            f"tokens[{t}] is {int(tokens[t])}, outside 0..{limit - 1}"
            + (
                ""
                if vocab_size is None
                else f" (model.vocab_size={vocab_size}): the file belongs to another tokenizer"
            )
        )


def _check_logprobs(values: NDArray[np.floating], *, name: str, active: NDArray[np.bool_]) -> None:
    bad = active & ~np.isfinite(values)
    if bad.any():
        t = _first(bad)
        raise Refusal(
            f"{name}[{t}] is {values[t]} in an active slot: null, NaN and infinity are allowed only where "
            "the token is not scored; mask the token or leave the sample out"
        )
    bad = active & (values > LARGEST_LOGPROB)
    if bad.any():
        t = _first(bad)
        raise Refusal(
            f"{name}[{t}] is {values[t]:g}: a log-prob is at most 0: record logarithms of probabilities, not "
            "probabilities or negative log-probs"
        )
    bad = active & (values < LOWEST_LOGPROB)
    if bad.any():
        t = _first(bad)
        raise Refusal(
            f"{name}[{t}] is {values[t]:g}, below {LOWEST_LOGPROB:g}: a token that was drawn is likelier; "
            "mask the token or leave the sample out"
        )


def without_surplus(routes: NDArray[np.integer], *, tokens: int) -> tuple[NDArray[np.integer], int]:
    """Recorded routes as [T-1, L, K], and how many rows were dropped: the row of the last token, which some
    programs record although no decision follows it. Any other number of rows is refused: which token a row
    belongs to would be a guess.
    """
    surplus = len(routes) - (tokens - 1)
    if surplus not in (0, 1):
        raise Refusal(
            f"{len(routes)} route rows for {tokens} tokens: expected {tokens - 1}, or {tokens} where the "
            "last token has one too: record routes of the whole sample, and cut them together with its tokens"
        )
    return routes[: tokens - 1], surplus


def checked_routes(
    routes: NDArray[np.integer], *, tokens: int, layout: ExpertLayout, all_layers: int | None = None
) -> NDArray[np.integer]:
    """`routes` [T-1, L, K] once they are known to be replayable, in the order of `layout.routed_layers`.

    `all_layers`: the layer axis runs over this many layers, dense ones included, whose rows are dropped
    unread. Refuses a wrong shape, a dtype that cannot hold every expert id, ids out of range, and a row that
    names an expert twice (such rows corrupt other tokens of the dispatch).
    """
    if routes.dtype.kind not in "iu":
        raise Refusal(f"routes have dtype {routes.dtype}: expert ids are integers")
    if np.iinfo(routes.dtype).max < layout.num_experts - 1:
        raise Refusal(
            f"routes have dtype {routes.dtype}, which holds ids up to {np.iinfo(routes.dtype).max}, but "
            f"num_experts is {layout.num_experts}: ids may have wrapped, record them in a wider type"
        )
    _check_route_shape(routes.shape, tokens=tokens, layout=layout, all_layers=all_layers)
    if all_layers is not None:
        routes = routes[:, list(layout.routed_layers)]
    rows = max(1, _BLOCK_IDS // max(1, routes.shape[1] * layout.top_k))
    for start in range(0, len(routes), rows):
        _check_route_ids(routes[start : start + rows], first_row=start, layout=layout)
    return routes


def _check_route_shape(
    shape: tuple[int, ...], *, tokens: int, layout: ExpertLayout, all_layers: int | None
) -> None:
    if len(shape) != 3:
        raise Refusal(f"routes have shape {shape}: expected three axes (tokens - 1, layers, top_k)")
    rows, layers, top_k = shape
    if rows != tokens - 1:
        raise Refusal(
            f"routes have {rows} rows for {tokens} tokens, expected {tokens - 1}: engines record no route "
            "for the last token, and routes must be cut together with the tokens"
        )
    if all_layers is not None and layers != all_layers:
        raise Refusal(
            f"routes have {layers} layers, expected {all_layers}: route_layers is 'all' in the metadata"
        )
    if all_layers is None and layers != len(layout.routed_layers):
        raise Refusal(
            f"routes have {layers} layers, routed_layers names {len(layout.routed_layers)}: "
            "write route_layers: all into the metadata if the axis also counts dense layers"
        )
    if top_k != layout.top_k:
        raise Refusal(f"routes have {top_k} experts per token, top_k is {layout.top_k}")


def _check_route_ids(routes: NDArray[np.integer], *, first_row: int, layout: ExpertLayout) -> None:
    """Range and distinctness of one block of rows."""
    if routes.size == 0:
        return
    if int(routes.min()) < 0 or int(routes.max()) >= layout.num_experts:
        row, layer, k = np.argwhere((routes < 0) | (routes >= layout.num_experts))[0]
        raise Refusal(
            f"routes row {first_row + int(row)}, layer {layout.routed_layers[layer]}: expert id "
            f"{int(routes[row, layer, k])} is outside 0..{layout.num_experts - 1}; logical ids are needed"
        )
    top_k = layout.top_k
    columns = np.ascontiguousarray(routes.reshape(-1, top_k).T)
    # Every pair of slots is compared once: slot j with slot j + shift.
    if any((columns[shift:] == columns[:-shift]).any() for shift in range(1, top_k)):
        ordered = np.sort(routes, axis=-1)
        row, layer, k = np.argwhere(ordered[..., 1:] == ordered[..., :-1])[0]
        raise Refusal(
            f"routes row {first_row + int(row)}, layer {layout.routed_layers[layer]}: expert "
            f"{int(ordered[row, layer, k])} appears more than once in {routes[row, layer].tolist()}; "
            "all-zero or repeated captures are not routes"
        )


def check_layout(
    collection: Collection, *, expected: ExpertLayout | None, replay: bool, max_seq_len: int | None = None
) -> None:
    """Refuse a collection that was recorded on another model than the one to train or score.

    `expected` is the model's layout, None for a model without experts. Without replay no route is read, so
    expert counts are not compared.
    """
    where, found = collection.source, collection.layout
    reasons: list[str] = []
    if replay and found is not None:
        if expected is None:
            reasons.append(
                f"{where}: the file records routes of {found.num_experts} experts, the model has none "
                "(model.num_experts=0): set policy.replay=false or choose the model that generated the file"
            )
        else:
            reasons += [
                f"{where}: {name} is {_show(theirs)} in the file, {_show(ours)} in the model (model.{key}): "
                "choose the model that generated the file, or set policy.replay=false"
                for name, key, theirs, ours in (
                    ("num_experts", "num_experts", found.num_experts, expected.num_experts),
                    ("top_k", "top_k", found.top_k, expected.top_k),
                    ("routed_layers", "dense_layers", found.routed_layers, expected.routed_layers),
                )
                if theirs != ours
            ]
    if max_seq_len is not None:
        long = [sample for sample in collection.samples if len(sample) > max_seq_len]
        if long:
            longest = max(long, key=len)
            reasons.append(
                f"{where}: sample {longest.id!r} has {len(longest)} tokens, more than "
                f"model.max_seq_len={max_seq_len} ({len(long)} such samples): a pack's budget does not "
                "enlarge the context of a document"
            )
    if reasons:
        raise Refusal(reasons)


def check_sampling(collection: Collection, *, temperature: float) -> None:
    """Refuse a collection whose tokens were drawn from another distribution than the one that is trained,
    that of `temperature`.
    """
    deviations = collection.sampling.deviations(temperature=temperature)
    if not deviations:
        return
    settings = ", ".join(f"{name}={value:g}" for name, value in deviations.items())
    neutral = {entry.name: entry.metadata["neutral"][0] for entry in fields(Sampling)}
    wanted = ", ".join(
        f"{name}={value:g}" for name, value in (neutral | {"temperature": temperature}).items()
    )
    drawn = deviations.get("temperature", 0.0)
    fix = f"set rollouts.temperature={drawn:g}" if drawn > 0 and len(deviations) == 1 else ""
    raise Refusal(
        f"{collection.source}: tokens were drawn with {settings}, training computes probabilities at "
        f"rollouts.temperature={temperature:g} over the whole vocabulary: "
        f"{fix + ', or ' if fix else ''}generate with {wanted}"
    )


def _show(value: int | tuple[int, ...]) -> str:
    return f"{len(value)} layers {list(value)}" if isinstance(value, tuple) else str(value)


def _first(mask: NDArray[np.bool_]) -> int:
    return int(np.argmax(mask))
