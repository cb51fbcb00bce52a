"""Rollouts of other systems: every reader against files written here in its format, faults by name.

The model of these tests: layer 0 dense, layers 1 and 2 routed, 8 experts, top-2. Sample n has its own tokens,
log-probs and routes, so that a value in a wrong place shows.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from olmo_rl.cli import run as run_command
from olmo_rl.config import ImportsConfig, SamplingConfig
from olmo_rl.data.files import read_collection, write_collection
from olmo_rl.rollouts.importers.engine_answers import join_turns
from olmo_rl.rollouts.importers.importing import ImportReport, import_file, import_paths
from olmo_rl.rollouts.importers.suspicious_routes import inspect_routes
from olmo_rl.rollouts.wire import Completion, RouteAxis, completions_of, decode_routes
from olmo_rl.types import FIELDS, Collection, ExpertLayout, Refusal, Sampling

LAYOUT = ExpertLayout(num_experts=8, top_k=2, routed_layers=(1, 2))
AXIS = RouteAxis(layout=LAYOUT, num_layers=3)
PROMPT, RESPONSE = 3, 4
TOKENS = PROMPT + RESPONSE
VOCABULARY = 100


def tokens_of(n: int, *, count: int = TOKENS) -> list[int]:
    return [(10 * n + t) % VOCABULARY for t in range(count)]


def logprobs_of(n: int) -> list[float]:
    return [-0.125 * (n + 1) - 0.5 * t for t in range(RESPONSE)]


def routes_of(n: int, *, rows: int = TOKENS - 1, layers: int = 2) -> np.ndarray:
    """Distinct by sample, row and layer; the two ids of a row differ."""
    first = (n + np.arange(rows)[:, None] + 3 * np.arange(layers)) % 8
    return np.stack([first, (first + 1 + np.arange(rows)[:, None] % 6) % 8], axis=-1).astype(np.int32)


def imported(
    path: Path, source: str, *, axis: RouteAxis | None = AXIS, **options: Any
) -> tuple[Collection, ImportReport]:
    return import_file(
        path, source=source, options=ImportsConfig(**options), axis=axis, vocab_size=VOCABULARY
    )


def refused(path: Path, source: str, **options: Any) -> str:
    with pytest.raises(Refusal) as refusal:
        imported(path, source, **options)
    return str(refusal.value)


def dumped(n: int, **changes: Any) -> dict[str, Any]:
    """One sample as `Sample.to_dict` writes it: the fields of miles (radixark/miles, miles/utils/types.py at
    002ce70), all of which slime has too.
    """
    return {
        "group_index": n // 2,
        "index": n,
        "prompt": f"prompt {n // 2}",
        "tokens": tokens_of(n),
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": f"response {n}",
        "response_length": RESPONSE,
        "label": "7",
        "reward": float(n % 2),
        "loss_mask": [1] * RESPONSE,
        "weight_versions": ["5", "4"],
        "rollout_log_probs": logprobs_of(n),
        "rollout_routed_experts": routes_of(n),
        "remove_sample": False,
        "status": "completed",
        "metadata": {"domain": "math"},
        "generate_function_path": None,
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {},
        "prefix_cache_info": {},
    } | changes


# Fields of slime's Sample that miles lacks (THUDM/slime, slime/utils/types.py at 7985bf2 and 0d234f3; the
# last three came later, with siblings of one trajectory and top-p replay).
SLIME: dict[str, Any] = {
    "raw_prompt": None,
    "teacher_log_probs": None,
    "mopd_teacher_log_probs": None,
    "rollout_id": None,
    "rollout_top_p_token_ids": None,
    "rollout_top_p_token_offsets": None,
}


def dump(path: Path, *samples: dict[str, Any], rollout_id: int = 3) -> Path:
    torch.save({"rollout_id": rollout_id, "samples": list(samples)}, path)
    return path


def test_a_dump_of_miles_becomes_samples_with_every_value_where_it_belongs(tmp_path: Path) -> None:
    path = dump(tmp_path / "rollout_3.pt", *(dumped(n) for n in range(4)))
    collection, report = imported(path, "miles")
    assert [sample.id for sample in collection.samples] == ["3:0", "3:1", "3:2", "3:3"]
    assert [sample.group for sample in collection.samples] == ["0", "0", "1", "1"]
    assert [sample.reward for sample in collection.samples] == [0, 1, 0, 1]
    for n, sample in enumerate(collection.samples):
        assert sample.tokens.tolist() == tokens_of(n)
        assert sample.response_mask.tolist() == [False] * PROMPT + [True] * RESPONSE
        assert sample.behavior_logprobs[PROMPT:].tolist() == logprobs_of(n)
        assert sample.routes is not None
        np.testing.assert_array_equal(sample.routes, routes_of(n))
        assert sample.policy_version == 4  # the oldest weights that wrote part of it
        assert (sample.finish_reason, sample.response) == ("stop", f"response {n}")
    assert report.as_json()["groups"] == {"of 2": 2}
    assert report.as_json()["route_coverage"] == 1.0
    assert report.as_json()["missing_fields"] == {}
    assert report.as_json()["ignored_fields"] == {}


def test_a_dump_of_slime_gives_the_same_samples(tmp_path: Path) -> None:
    changes = [SLIME | {"rollout_routed_experts": torch.from_numpy(routes_of(n))} for n in range(2)]
    slime = dump(tmp_path / "s.pt", *(dumped(n, **changes[n]) for n in range(2)))
    found, report = imported(slime, "slime")
    expected, _ = imported(dump(tmp_path / "m.pt", dumped(0), dumped(1)), "miles")
    assert report.ignored == {}
    for one, other in zip(found.samples, expected.samples, strict=True):
        for entry in FIELDS:
            np.testing.assert_array_equal(getattr(one, entry.name), getattr(other, entry.name), entry.name)


def test_fields_in_another_order_and_a_field_more_change_nothing_and_are_reported(tmp_path: Path) -> None:
    plain, _ = imported(dump(tmp_path / "a.pt", dumped(0), dumped(1)), "slime")
    shuffled = [dict(reversed(dumped(n).items())) for n in range(2)]
    for n, sample in enumerate(shuffled):
        sample["opd_domain"] = f"new {n}"
    again, report = imported(dump(tmp_path / "b.pt", *shuffled), "slime")
    for one, other in zip(plain.samples, again.samples, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.behavior_logprobs.tolist() == other.behavior_logprobs.tolist()
        assert one.routes is not None
        assert other.routes is not None
        np.testing.assert_array_equal(one.routes, other.routes)
    assert report.ignored == {"opd_domain": 2}


def test_tools_removed_samples_and_unfinished_ones_are_told_apart(tmp_path: Path) -> None:
    tool = dumped(0, loss_mask=[1, 0, 0, 1])
    removed = dumped(1, remove_sample=True)
    aborted = dumped(2, status="aborted")
    empty = dumped(3, response_length=0, loss_mask=[], rollout_log_probs=[], status="failed")
    collection, report = imported(dump(tmp_path / "d.pt", tool, removed, aborted, empty), "miles")
    first, second = collection.samples
    assert first.response_mask.tolist() == [False] * 3 + [True, False, False, True]
    assert second.response_mask.sum() == RESPONSE
    assert not second.scored.any()
    assert report.left_out == {"status aborted": 1, "status failed, no response": 1}
    assert report.turns == 3  # two spans around the tool's answer, one of the removed sample


def test_dense_layers_and_a_surplus_row_leave_the_routes_and_are_counted(tmp_path: Path) -> None:
    whole = routes_of(0, rows=TOKENS, layers=3)
    path = dump(tmp_path / "d.pt", dumped(0, rollout_routed_experts=torch.from_numpy(whole)))
    collection, report = imported(path, "miles")
    assert collection.samples[0].routes is not None
    np.testing.assert_array_equal(collection.samples[0].routes, whole[:-1, 1:])
    assert (report.surplus_rows, report.dense_layers_cut) == (1, 1)


def test_a_dump_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return (Path.touch, (tmp_path / "sprung",))

    path = tmp_path / "d.pt"
    torch.save({"samples": [dumped(0, metadata=Trap())]}, path)
    assert "could run its author's code" in refused(path, "miles")
    path.write_bytes(pickle.dumps(Trap()))
    assert "d.pt" in refused(path, "miles")
    whole = dump(tmp_path / "whole.pt", dumped(0)).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not a file of torch.save, or a cut one" in refused(path, "miles")
    torch.save({"samples": [dumped(0)]}, path, _use_new_zipfile_serialization=False)
    assert imported(path, "miles")[0].samples, "the older form has no checksums"
    assert not (tmp_path / "sprung").exists()


def test_a_flipped_bit_in_a_tensor_of_a_dump_is_found_by_the_checksum_of_its_archive(tmp_path: Path) -> None:
    routes = torch.from_numpy(routes_of(0))
    path = dump(tmp_path / "d.pt", dumped(0, rollout_routed_experts=routes))
    whole = path.read_bytes()
    place = whole.index(routes.numpy().tobytes())
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert "differs from its checksum" in refused(path, "miles")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_log_probs": logprobs_of(0)[:-1]}, "rollout_log_probs has 3 entries, response_length is 4"),
        ({"rollout_log_probs": None}, "no rollout_log_probs"),
        (
            {"rollout_log_probs": [0.0, float("nan"), 0.0, 0.0]},
            "behavior_logprobs[4] is nan in an active slot",
        ),
        ({"loss_mask": [1, 1, 2, 1]}, "loss_mask[2] is 2: expected true, false, 0 or 1"),
        ({"tokens": [*tokens_of(0)[:-1], 1.5]}, "tokens[6] is 1.5: expected an integer"),
        ({"tokens": [*tokens_of(0)[:-1], VOCABULARY]}, f"tokens[6] is {VOCABULARY}, outside"),
        ({"response_length": 9}, "response_length is 9 for 7 tokens"),
        ({"reward": None}, "imports.default_reward"),
        ({"reward": {"accuracy": 1.0, "format": 0.5}}, "imports.reward_key"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"group_index": None}, "imports.group_size"),
        ({"rollout_routed_experts": None}, "no routes were recorded"),
        ({"rollout_routed_experts": routes_of(0)[:-1]}, "5 route rows for 7 tokens: expected 6, or 7"),
        ({"rollout_routed_experts": routes_of(0, rows=8)}, "8 route rows for 7 tokens: expected 6, or 7"),
        ({"rollout_routed_experts": routes_of(0, rows=30)}, "30 route rows for 7 tokens"),
        ({"rollout_top_p_token_ids": [1, 2]}, "tokens were drawn from a truncated nucleus"),
        ({"rollout_routed_experts": routes_of(0)[..., :1]}, "1 experts per token, top_k is 2"),
        ({"rollout_routed_experts": routes_of(0, layers=4)}, "4 layers, the model has 2 or 3"),
        ({"rollout_routed_experts": routes_of(0) * 0}, "row 0, layer 1: expert 0 appears more than once"),
        ({"rollout_routed_experts": routes_of(0) - 1}, "is outside 0..7; logical ids are needed"),
        ({"rollout_routed_experts": routes_of(0) + 1}, "is outside 0..7; logical ids are needed"),
        ({"rollout_routed_experts": routes_of(0).astype(float)}, "expert ids are integers"),
    ],
)
def test_what_is_wrong_with_a_sample_is_said_with_its_place(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = dump(tmp_path / "d.pt", dumped(1), dumped(0, **changes))
    message = refused(path, "miles")
    assert words in message
    assert message.startswith(f"{path} sample 1: ")


def test_two_samples_of_one_id_are_refused_by_both_places(tmp_path: Path) -> None:
    path = dump(tmp_path / "d.pt", dumped(0), dumped(0))
    assert f"{path} sample 1: sample '3:0' has the id of {path} sample 0" in refused(path, "miles")


def test_samples_of_one_trajectory_of_slime_are_kept_apart(tmp_path: Path) -> None:
    parts = [dumped(0, rollout_id=9), dumped(1, index=0, rollout_id=9), dumped(2, index=2, rollout_id=None)]
    collection, report = imported(dump(tmp_path / "d.pt", *parts), "slime")
    assert [sample.id for sample in collection.samples] == ["3:0", "3:0.1", "3:2"]
    assert [sample.group for sample in collection.samples] == ["0", "0", "1"]
    assert [sample.tokens.tolist() for sample in collection.samples] == [tokens_of(n) for n in range(3)]
    assert report.ignored == {}


def test_a_removed_sample_keeps_the_mask_of_its_tools(tmp_path: Path) -> None:
    masked = dumped(0, remove_sample=True, loss_mask=[1, 0, 0, 1])
    emptied = dumped(1, remove_sample=True, loss_mask=[0, 0, 0, 0])
    collection, _ = imported(dump(tmp_path / "d.pt", masked, emptied), "slime")
    assert [int(sample.response_mask.sum()) for sample in collection.samples] == [2, 4]
    assert [bool(sample.scored.any()) for sample in collection.samples] == [False, False]


def test_options_answer_what_a_file_leaves_open(tmp_path: Path) -> None:
    bare = {"group_index": None, "index": None, "reward": {"accuracy": 0.25}, "weight_versions": []}
    path = dump(tmp_path / "d.pt", *(dumped(n, **bare) for n in range(4)))
    collection, report = imported(path, "miles", group_size=2, reward_key="accuracy")
    assert [sample.id for sample in collection.samples] == ["0", "1", "2", "3"]
    assert [sample.group for sample in collection.samples] == ["group-0", "group-0", "group-1", "group-1"]
    assert {sample.reward for sample in collection.samples} == {0.25}
    assert report.lacks == {"policy_version": 4}
    broken_file = dump(
        tmp_path / "e.pt", dumped(0), dumped(1, rollout_routed_experts=None), dumped(2, reward=None)
    )
    collection, report = imported(broken_file, "miles", leave_out_bad_routes=True, default_reward=0.5)
    assert [sample.reward for sample in collection.samples] == [0.0, 0.5]
    assert report.left_out == {"no routes": 1}
    collection, _ = imported(broken_file, "miles", axis=None, default_reward=0.5)
    assert [sample.routes for sample in collection.samples] == [None, None, None]


def test_suspicious_captures_are_counted_by_kind_and_sample(tmp_path: Path) -> None:
    stuck = np.repeat(routes_of(0)[:1], 11, axis=0)
    assert inspect_routes(stuck, num_experts=8).repeated == 11
    assert inspect_routes(stuck[:7], num_experts=8).repeated == 0
    assert inspect_routes(routes_of(0), num_experts=8).replayable
    holes = routes_of(1)
    holes[2] = -1
    capture = inspect_routes(holes, num_experts=8)
    assert (capture.unfilled, capture.duplicated, capture.replayable) == (1, 1, False)
    physical = routes_of(2) + 4
    assert inspect_routes(physical, num_experts=8).out_of_range == (physical >= 8).any(axis=(1, 2)).sum()
    path = dump(
        tmp_path / "d.pt",
        dumped(0),
        dumped(1, rollout_routed_experts=holes),
        dumped(2, rollout_routed_experts=routes_of(2) * 0),
    )
    collection, report = imported(path, "miles", leave_out_bad_routes=True)
    assert [sample.id for sample in collection.samples] == ["3:0"]
    assert report.left_out == {"routes that cannot be replayed": 2}
    assert report.captures == {"unfilled": 1, "zero": 6, "duplicated": 7}
    assert report.examples == {"unfilled": ["3:1"], "zero": ["3:2"], "duplicated": ["3:1", "3:2"]}


def example(n: int, **changes: Any) -> dict[str, Any]:
    """The fields of prime-rl's `TrainingSample` with weights of loss components, in order
    (PrimeIntellect-ai/prime-rl, src/prime_rl/transport/types.py).
    """
    whole = np.concatenate([routes_of(n), np.zeros((1, 2, 2), dtype=np.int32)])
    return {
        "prompt_ids": tokens_of(n)[:PROMPT],
        "prompt_mask": [False] * PROMPT,
        "completion_ids": tokens_of(n)[PROMPT:],
        "completion_mask": [True, True, n % 2 == 0, True],
        "completion_logprobs": logprobs_of(n),
        "completion_temperatures": [1.0] * RESPONSE,
        "env_name": "math",
        "ref_logprobs": None,
        "advantage": 0.75,
        "reward": 2.0 + n,
        "mm_kwargs": None,
        "routed_experts": [whole.astype(np.uint8).tobytes(), list(whole.shape), "uint8"],
        "mm_token_type_ids": None,
        "rl_weights": None,
        "ce_weights": None,
        "ref_kl_weights": None,
        "token_advantages": None,
        "completion_obs_mask": None,
    } | changes


def assert_examples(collection: Collection, *, count: int) -> None:
    assert len(collection.samples) == count
    for n, sample in enumerate(collection.samples):
        assert sample.tokens.tolist() == tokens_of(n)
        assert sample.response_mask.tolist() == [False] * 3 + [True, True, n % 2 == 0, True]
        assert sample.behavior_logprobs[PROMPT:].tolist() == logprobs_of(n)
        assert sample.reward == 2.0 + n
        assert sample.routes is not None
        np.testing.assert_array_equal(sample.routes, routes_of(n))


def pack(path: Path, *examples: Any) -> Path:
    """`TrainingBatch` as [examples, step, run_idx]."""
    path.write_bytes(msgpack.packb([list(examples), 17, None]))
    return path


def without(fields: dict[str, Any], *names: str) -> list[Any]:
    return [value for name, value in fields.items() if name not in names]


LATER = ("rl_weights", "ce_weights", "ref_kl_weights", "token_advantages", "completion_obs_mask")


def flat_example(n: int, *behind: Any) -> list[Any]:
    """The flat forms: token_ids, mask, logprobs, temperatures, env_name, and the fields behind these."""
    mask = [False] * 3 + [True, True, n % 2 == 0, True]
    return [tokens_of(n), mask, [0.0] * 3 + logprobs_of(n), [1.0] * TOKENS, "math", *behind]


def test_every_published_training_sample_of_prime_rl_is_read(tmp_path: Path) -> None:
    routes = [example(n)["routed_experts"] for n in range(2)]
    channel = ["policy", [0.5] * TOKENS, [True] * TOKENS]
    forms: dict[str, list[list[Any]]] = {
        "components": [list(example(n).values()) for n in range(2)],
        "trailing defaults left out": [without(example(n), "mm_token_type_ids", *LATER) for n in range(2)],
        "training modes": [[*without(example(n), *LATER), "rl", None] for n in range(2)],
        "before environments": [
            without(example(n, routed_experts=routes_of(n).tolist()), "env_name", *LATER) for n in range(2)
        ],
        "flat by loss": [flat_example(n, [channel], 2.0 + n, None, routes[n]) for n in range(2)],
    }
    for name, examples in forms.items():
        path = pack(tmp_path / "rollouts.bin", *examples)
        collection, report = imported(path, "prime_rl", group_size=2)
        assert_examples(collection, count=2)
        assert [sample.id for sample in collection.samples] == ["17:0", "17:1"], name
        assert report.surplus_rows == (0 if name == "before environments" else 2), name
        assert report.lacks == {"policy_version": 2}, name
        assert collection.sampling == Sampling(temperature=1.0), name
        assert report.ignored == {}, name


def test_the_flat_form_without_rewards_needs_one_and_keeps_its_reference(tmp_path: Path) -> None:
    reference = [-0.5] * TOKENS
    path = pack(tmp_path / "flat.bin", flat_example(0, reference, None, None, example(0)["routed_experts"]))
    assert "imports.default_reward" in refused(path, "prime_rl", group_size=1)
    collection, report = imported(path, "prime_rl", group_size=1, default_reward=2.0)
    assert collection.samples[0].ref_logprobs is not None
    assert collection.samples[0].ref_logprobs.tolist() == reference
    assert report.lacks == {"reward": 1, "policy_version": 1}


def test_a_field_that_versions_name_differently_is_not_read(tmp_path: Path) -> None:
    fields = without(example(0, ref_logprobs=[-1.0] * TOKENS), "mm_token_type_ids", *LATER)
    collection, report = imported(pack(tmp_path / "a.bin", fields), "prime_rl", group_size=1)
    assert collection.samples[0].ref_logprobs is None
    assert report.ignored == {"teacher_logprobs or ref_logprobs": 1}
    certain = list(example(0, ref_logprobs=[-1.0] * TOKENS, rl_weights=[1.0] * TOKENS).values())
    collection, report = imported(pack(tmp_path / "b.bin", certain), "prime_rl", group_size=1)
    assert collection.samples[0].ref_logprobs is not None
    assert report.ignored == {"rl_weights": 1}


def test_temperatures_of_prime_rl_are_sampling_settings(tmp_path: Path) -> None:
    cool = [list(example(n, completion_temperatures=[0.5] * RESPONSE).values()) for n in range(2)]
    collection, _ = imported(pack(tmp_path / "a.bin", *cool), "prime_rl", group_size=2)
    assert collection.sampling == Sampling(temperature=0.5)
    mixed = pack(tmp_path / "b.bin", *cool, list(example(2).values()))
    assert "example 2: sampled with temperature=1.0" in refused(mixed, "prime_rl", group_size=1)
    turns = pack(tmp_path / "c.bin", list(example(0, completion_temperatures=[1, 1, 0.5, 1]).values()))
    assert "temperatures [0.5, 1.0]" in refused(turns, "prime_rl", group_size=1)


def micro_batch() -> list[Any]:
    """`MicroBatch` with two packed samples, as in src/prime_rl/transports/batch/types.py at 0f59b24:
    input_ids, loss_mask, advantages, inference_logprobs, position_ids, sequence_lengths, temperatures,
    env_names, seq_lens.
    """
    positions = [*range(TOKENS), *range(TOKENS)]
    count = 2 * TOKENS
    return [
        tokens_of(0) + tokens_of(1),
        [True] * count,
        [0.5] * count,
        [-1.0] * count,
        positions,
        [TOKENS, TOKENS],
        [1.0] * count,
        ["math"] * count,
        [TOKENS, TOKENS],
    ]


def test_other_forms_of_prime_rl_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.bin"
    path.write_bytes(msgpack.packb([micro_batch(), micro_batch()]))
    assert "a list of MicroBatch, which prime-rl writes as rank_N.bin" in refused(
        path, "prime_rl", group_size=1
    )
    path.write_bytes(msgpack.packb([[list(example(0).values())], 1.0, 17]))  # with a temperature, before 0.4
    assert "no TrainingBatch [examples, step, run_idx]" in refused(path, "prime_rl", group_size=1)
    for fields in (
        [*example(0).values(), "a field of tomorrow"],
        without(example(0), "completion_mask"),
        list(example(0, env_name=3).values()),
    ):
        message = refused(pack(path, fields), "prime_rl", group_size=1)
        assert "that are no TrainingSample of prime-rl" in message
        assert "imports.source=package.module.function" in message
    mode = [*without(example(0), *LATER), "sft", None]
    assert "1 x training_mode sft" in refused(pack(path, mode), "prime_rl", group_size=1)


def test_a_batch_of_prime_rl_without_groups_cut_or_with_other_routes_is_refused(
    tmp_path: Path,
) -> None:
    path = pack(tmp_path / "rollouts.bin", list(example(0).values()))
    assert "imports.group_size" in refused(path, "prime_rl")
    path.write_bytes(path.read_bytes()[:-20])
    assert "is the file cut?" in refused(path, "prime_rl", group_size=1)
    trained = pack(tmp_path / "b.bin", list(example(0, prompt_mask=[False, True, False]).values()))
    assert "prompt_mask is true at token 1" in refused(trained, "prime_rl", group_size=1)
    longer = [routes_of(0, rows=30).astype(np.uint8).tobytes(), [30, 2, 2], "uint8"]
    path = pack(tmp_path / "c.bin", list(example(0, routed_experts=longer).values()))
    assert "30 route rows for 7 tokens: expected 6, or 7" in refused(path, "prime_rl", group_size=1)


def npy(routes: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def choice(n: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": n,
        "text": f"response {n}",
        "token_ids": tokens_of(n)[PROMPT:],
        "logprobs": {"token_logprobs": logprobs_of(n), "tokens": ["a"] * RESPONSE},
        "finish_reason": "stop",
    } | changes


ENCODINGS: dict[str, Any] = {
    "vllm 0.22": lambda r: {"routed_experts": npy(r.astype(np.uint8))},
    "sglang openai": lambda r: {"sglext": {"routed_experts": base64.b64encode(r.tobytes()).decode()}},
    "nested lists": lambda r: {"routed_experts": r.tolist()},
    "parts": lambda r: {
        "routed_experts": {
            "encoding": "base64",
            "dtype": "int16",
            "shape": list(r.shape),
            "data": base64.b64encode(r.astype(np.int16).tobytes()).decode(),
        }
    },
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("surplus", [0, 1])
def test_every_spelling_of_routes_gives_the_same_rows(encoding: str, layers: int, surplus: int) -> None:
    routes = routes_of(5, rows=TOKENS - 1 + surplus, layers=layers)
    given = ENCODINGS[encoding](routes)
    beside = {name: given.pop(name) for name in list(given) if name == "sglext"}  # SGLang: beside the choices
    body = {"prompt_token_ids": tokens_of(5)[:PROMPT], "choices": [choice(5, **given)]} | beside
    (completion,) = completions_of(body, axis=AXIS)
    assert completion.routes is not None
    np.testing.assert_array_equal(completion.routes, routes[: TOKENS - 1])
    assert completion.surplus_rows == surplus
    assert completion.logprobs.tolist() == logprobs_of(5)
    np.testing.assert_array_equal(AXIS.routed(completion.routes), routes[: TOKENS - 1, layers - 2 :])


def test_prompt_routes_beside_the_choices_come_before_those_of_each_choice() -> None:
    routes = routes_of(1)
    body = {
        "prompt_token_ids": tokens_of(1)[:PROMPT],
        "prompt_routed_experts": routes[:PROMPT].tolist(),
        "choices": [choice(1, routed_experts=routes[PROMPT:].tolist())],
    }
    (completion,) = completions_of(body, axis=AXIS)
    assert completion.routes is not None
    np.testing.assert_array_equal(completion.routes, routes)
    body["prompt_routed_experts"] = routes[: PROMPT - 1].tolist()
    with pytest.raises(Refusal, match="5 route rows, expected 6"):
        completions_of(body, axis=AXIS)


def test_an_answer_of_generate_is_a_completion_too() -> None:
    routes = routes_of(2)
    body = {
        "text": "response 2",
        "meta_info": {
            "output_token_logprobs": [
                [p, t, None] for p, t in zip(logprobs_of(2), tokens_of(2)[PROMPT:], strict=True)
            ],
            "finish_reason": {"type": "length", "length": RESPONSE},
            "weight_version": "9",
            "routed_experts": base64.b64encode(routes.tobytes()).decode(),
        },
    }
    (completion,) = completions_of([body], axis=AXIS, prompt=tokens_of(2)[:PROMPT])
    assert completion.tokens.tolist() == tokens_of(2)[PROMPT:]
    assert (completion.finish_reason, completion.policy_version) == ("length", 9)
    np.testing.assert_array_equal(completion.routes, routes)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "neither choices"),
        ({"choices": {}}, "choices is dict"),
        ({"choices": [choice(0)]}, "no prompt_token_ids"),
        ({"choices": [choice(0, token_ids=None)], "prompt_token_ids": [1]}, "no token_ids"),
        (
            {"choices": [choice(0, token_ids=[1, -2])], "prompt_token_ids": [1]},
            "token_ids holds an id outside",
        ),
        ({"choices": [choice(0, logprobs=None)], "prompt_token_ids": [1]}, "no logprobs"),
        (
            {"choices": [choice(0, token_ids=[1])], "prompt_token_ids": [1]},
            "4 log-probs for 1 generated tokens",
        ),
    ],
)
def test_an_answer_that_lacks_something_says_what(body: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        completions_of(body, axis=None)


def test_routes_that_are_no_routes_are_refused() -> None:
    for payload, words in (
        ("not base64!", "no base64"),
        (base64.b64encode(b"\x93NUMPY broken").decode(), "damaged .npy"),
        (base64.b64encode(bytes(4 * 7)).decode(), "no int32"),
        ([[[1, 2]], [[1, 2], [3, 4]]], "unequal lengths"),
        ({"dtype": "int16", "shape": [1, 2, 2], "data": "AAAA"}, "do not fit"),
        ({"dtype": "O", "shape": [1, 2, 2], "data": "AAAA"}, "expert ids are integers"),
    ):
        with pytest.raises(Refusal, match=words):
            decode_routes(payload, axis=AXIS, rows=6)


def turn(prompt: list[int], tokens: list[int], *, seed: int, version: int) -> Completion:
    return Completion(
        prompt=np.array(prompt, dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.array([-float(token) for token in tokens], dtype=np.float32),
        routes=routes_of(seed, rows=len(prompt) + len(tokens) - 1),
        finish_reason="stop",
        policy_version=version,
    )


def test_the_prefill_of_the_second_turn_supplies_the_row_that_the_first_could_not_have() -> None:
    first = turn([1, 2], [3, 4], seed=0, version=7)
    second = turn([1, 2, 3, 4, 50, 51], [6], seed=3, version=8)
    joined = join_turns([first, second])
    assert joined.tokens.tolist() == [1, 2, 3, 4, 50, 51, 6]
    assert joined.response_mask.tolist() == [False, False, True, True, False, False, True]
    assert joined.logprobs.tolist() == [0, 0, -3, -4, 0, 0, -6]
    assert joined.policy_version == 7
    assert joined.routes is not None
    assert first.routes is not None
    assert second.routes is not None
    np.testing.assert_array_equal(joined.routes[:3], first.routes)
    np.testing.assert_array_equal(joined.routes[3:], second.routes[3:])
    with pytest.raises(Refusal, match="turn 1 does not continue the tokens of turn 0"):
        join_turns([first, turn([1, 2, 9, 4, 50], [6], seed=3, version=8)])


def test_lines_of_completions_become_groups_of_their_choices_and_conversations(tmp_path: Path) -> None:
    body = {
        "id": "cmpl-1",
        "prompt_token_ids": tokens_of(0)[:PROMPT],
        "choices": [choice(n, **ENCODINGS["vllm 0.22"](routes_of(n))) for n in range(2)],
        "weight_version": 6,
    }
    turns = [
        {
            "prompt_token_ids": tokens_of(4, count=3),
            "choices": [choice(4, routed_experts=npy(routes_of(4)))],
        },
        {
            "prompt_token_ids": tokens_of(4, count=9),
            "choices": [
                choice(
                    4,
                    token_ids=[1],
                    logprobs={"token_logprobs": [-1.0]},
                    routed_experts=npy(routes_of(4, rows=9)),
                )
            ],
        },
    ]
    lines = [
        {"response": body, "reward": [0.5, 1.5], "prompt": "lone \ud800 surrogate"},
        {"turns": turns, "reward": 3.0, "sample_id": "talk", "group_id": "g", "policy_version": 2},
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    collection, report = imported(path, "vllm")
    assert [s.id for s in collection.samples] == ["cmpl-1:0", "cmpl-1:1", "talk"]
    assert [s.group for s in collection.samples] == ["cmpl-1", "cmpl-1", "g"]
    assert [s.reward for s in collection.samples] == [0.5, 1.5, 3.0]
    assert [s.policy_version for s in collection.samples] == [6, 6, 2]
    assert collection.samples[0].prompt == "lone ? surrogate"
    assert collection.samples[2].response_mask.tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True]
    assert report.turns == 4
    path.write_text(json.dumps(body))
    assert "imports.default_reward" in refused(path, "sglang")
    path.write_text(json.dumps(lines[1])[:-9])
    assert "line 1: not JSON" in refused(path, "sglang")


def test_aborted_and_unfinished_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    prompt = tokens_of(0)[:PROMPT]
    reasons: list[str | None] = ["stop", "abort", None, "length"]
    bodies = [
        {"prompt_token_ids": prompt, "choices": [choice(n, finish_reason=reason)]}
        for n, reason in enumerate(reasons)
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps({"response": b, "reward": 1, "group_id": "g"}) for b in bodies))
    collection, report = imported(path, "sglang", axis=None)
    assert [sample.id for sample in collection.samples] == ["line-1", "line-4"]
    assert report.left_out == {"finish reason abort": 1, "finish reason None": 1}


def test_sampling_settings_come_from_the_records_or_from_keys(tmp_path: Path) -> None:
    body = {"prompt_token_ids": tokens_of(0)[:PROMPT], "choices": [choice(0)]}
    line = {"response": body, "reward": 1.0, "group_id": "g", "sampling": {"temperature": 0.7, "top_k": 20}}
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(line))
    asked = SamplingConfig(top_p=0.9, temperature=0.7)
    collection, report = imported(path, "vllm", axis=None, sampling=asked)
    assert collection.sampling == Sampling(temperature=0.7, top_p=0.9, top_k=20)
    assert report.as_json()["sampling"] == {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    message = refused(path, "vllm", axis=None, sampling=SamplingConfig(temperature=1.0))
    assert "sampled with temperature=0.7, but imports.sampling.temperature=1.0" in message
    path.write_text(json.dumps(line | {"sampling": {"temprature": 1}}))
    assert "did you mean 'temperature'?" in refused(path, "vllm", axis=None)
    write_collection(collection, tmp_path / "again.parquet")
    again, _ = imported(tmp_path / "again.parquet", "olmo_rl", axis=None)
    assert again.sampling == collection.sampling


def test_a_reader_of_ones_own_is_found_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_reader.py").write_text(
        "import json\n"
        "from olmo_rl.rollouts.importers import ForeignSample\n"
        "def read(path, *, options):\n"
        "    for n, line in enumerate(path.read_text().splitlines()):\n"
        "        yield ForeignSample(where=f'{path} line {n}', values=json.loads(line))\n"
        "def wrong(path, *, options):\n"
        "    yield {}\n"
        "nothing = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    line = {
        "group": 1,
        "tokens": tokens_of(0),
        "response_mask": [0, 0, 0, 1, 1, 1, 1],
        "behavior_logprobs": [None] * 3 + logprobs_of(0),
        "reward": 1.5,
        "routes": routes_of(0).tolist(),
        "has_placeholders": True,
    }
    path = tmp_path / "mine.txt"
    path.write_text(json.dumps(line))
    (sample,) = imported(path, "my_reader.read")[0].samples
    assert (sample.id, sample.group, sample.reward, sample.has_placeholders) == ("0", "1", 1.5, True)
    np.testing.assert_array_equal(sample.routes, routes_of(0))
    path.write_text(json.dumps(line | {"temperature": 1}))
    assert "line 0: the reader names 'temperature', which is no field of a sample" in refused(
        path, "my_reader:read"
    )
    path.write_text(json.dumps({name: line[name] for name in ("group", "reward")}))
    assert "line 0: no tokens, response_mask, behavior_logprobs" in refused(path, "my_reader:read")
    assert "its function yields dict" in refused(path, "my_reader:wrong")
    assert "no_such_module does not import" in refused(path, "no_such_module:read")
    assert "my_reader has no function nothing" in refused(path, "my_reader:nothing")
    assert "choose one of olmo_rl, slime, miles" in refused(path, "verl")


def test_a_directory_is_read_in_name_order_and_a_wrong_suffix_is_refused(tmp_path: Path) -> None:
    for name in ("b.pt", "a.pt", ".hidden.pt", "notes.txt"):
        (tmp_path / name).touch()
    assert [p.name for p in import_paths(tmp_path, source="slime")] == ["a.pt", "b.pt"]
    with pytest.raises(Refusal, match="imports.source=vllm reads .jsonl or .json"):
        import_paths(tmp_path / "a.pt", source="vllm")
    with pytest.raises(Refusal, match="holds no .bin or .msgpack file"):
        import_paths(tmp_path, source="prime_rl")


MODEL = ("model=moe_tiny", "model.num_experts=8", "model.top_k=2")


def test_the_command_writes_files_that_a_plan_and_training_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    from composing import compose_fast

    layers = len(compose_fast(*MODEL).model.routed_layers)
    samples = [dumped(n, rollout_routed_experts=routes_of(n, layers=layers)) for n in range(4)]
    dump(tmp_path / "rollout_0.pt", *samples)
    arguments = ["recipe=import", "imports.source=miles", "imports.path=rollout_0.pt", "run_name=i", *MODEL]
    assert run_command(arguments) == 0
    out = capsys.readouterr().out
    assert "outputs/i/rollouts" in out
    (file,) = (tmp_path / "outputs/i/rollouts").iterdir()
    collection = read_collection(file, require_routes=True)
    assert [sample.id for sample in collection.samples] == ["3:0", "3:1", "3:2", "3:3"]
    report = json.loads((tmp_path / "outputs/i/import_report.json").read_text())
    assert report["files"][0]["samples"] == 4
    files = ["rollouts=files", "rollouts.path=outputs/i/rollouts", "packing=consecutive", *MODEL]
    assert run_command(["recipe=plan", "run_name=p", "batch.samples_per_step=4", *files]) == 0
    training = ["callbacks=quiet", "batch.samples_per_step=4", "trainer.max_steps=1"]
    assert run_command(["run_name=t", *training, *files]) == 0
    assert (tmp_path / "outputs/t/metrics.csv").exists()


def test_a_refused_import_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dump(tmp_path / "a.pt", dumped(0))
    dump(tmp_path / "b.pt", dumped(0, reward=None))
    arguments = [
        "recipe=import",
        "imports.source=miles",
        "imports.path=.",
        "run_name=i",
        "policy.replay=false",
        *MODEL,
    ]
    assert run_command(arguments) == 2
    assert "b.pt sample 0: " in capsys.readouterr().err
    assert not (tmp_path / "outputs/i/rollouts").exists()
    assert not (tmp_path / "outputs/i/import_report.json").exists()
