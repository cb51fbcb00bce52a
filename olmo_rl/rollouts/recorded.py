"""Our own rollout files as one more source: JSONL written by hand becomes parquet, checked on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from olmo_rl.data.files import check_layout, read_collection
from olmo_rl.rollouts.found import FoundSample
from olmo_rl.rollouts.wire import RouteAxis


def read_recorded(path: Path, *, axis: RouteAxis | None, reward_key: str | None) -> Iterator[FoundSample]:
    """Every sample. The file's own metadata says what its routes are, the model where it has none."""
    del reward_key  # our files hold numbers
    collection = read_collection(
        path,
        require_routes=axis is not None,
        layout=None if axis is None else axis.layout,
        num_layers=None if axis is None else axis.num_layers,
    )
    check_layout(collection, expected=None if axis is None else axis.layout, replay=axis is not None)
    for number, sample in enumerate(collection.samples):
        yield FoundSample(
            where=f"{path} sample {number}",
            id=sample.id,
            group=sample.group,
            tokens=sample.tokens,
            response_mask=sample.response_mask,
            logprobs=sample.behavior_logprobs,
            reward=sample.reward,
            loss_mask=sample.loss_mask,
            ref_logprobs=sample.ref_logprobs,
            routes=sample.routes,
            policy_version=sample.policy_version,
            finish_reason=sample.finish_reason,
            prompt=sample.prompt,
            response=sample.response,
        )
