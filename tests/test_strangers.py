"""Files of strangers run no code, whoever reads them: checkpoints through every key and over HTTP."""

from __future__ import annotations

import ast
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from documents import ROOT
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata
from training_cases import MODEL, config_of, files, write_files

from olmo_rl import library
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.stored_checkpoint import load_plain_state, load_tensors, read_metadata
from olmo_rl.policy.weights import CHECKPOINT_PREFIX, check_weights, load_weights, read_weights
from olmo_rl.run_directory import MANIFEST, SCRATCH, finish_checkpoint
from olmo_rl.types import Refusal
from recipes.serve import read_below

EMBEDDING = "state_dict.decoder.tok_embeddings.weight"


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint of the tests' model, as torch writes it."""
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.init_weights(0)
    final = tmp_path_factory.mktemp("stored") / "step-1"
    scratch = final.with_name(final.name + SCRATCH)
    weights = {CHECKPOINT_PREFIX + name: p.detach() for name, p in decoder.named_parameters()}
    dcp.save({"state_dict": weights, "plain": {"lr": 0.5}}, checkpoint_id=scratch, no_dist=True)
    torch.save({"global_step": 1}, scratch / "meta.pt")
    finish_checkpoint(scratch, final=final)
    return final


def changed(stored: Path, place: Path, description: object) -> Path:
    """A copy of the checkpoint with another `.metadata` and the manifest that belongs to it."""
    scratch = place / f"step-1{SCRATCH}"
    shutil.copytree(stored, scratch)
    (scratch / MANIFEST).unlink()
    (scratch / ".metadata").write_bytes(pickle.dumps(description))
    finish_checkpoint(scratch, final=place / "step-1")
    return place / "step-1"


def test_a_checkpoint_of_torch_is_read_as_torch_reads_it(stored: Path) -> None:
    ours = read_metadata(stored, key="init_from")
    theirs = dcp.FileSystemReader(stored).read_metadata()
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, entry in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert type(found) is type(entry)
        if not isinstance(entry, BytesStorageMetadata):
            assert (found.size, found.chunks, found.properties.dtype) == (
                entry.size,
                entry.chunks,
                entry.properties.dtype,
            )
    weights = read_weights(str(stored))
    fresh = HybridDecoder(MODEL, attention="reference")
    fresh.init_weights(0)
    assert all(torch.equal(weights[name], p) for name, p in fresh.named_parameters())


def test_a_hostile_pickle_runs_nothing_through_any_key_or_request(stored: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = str(changed(stored, tmp_path, Hostile(marker)))
    decoder = HybridDecoder(MODEL, attention="reference")
    readers: dict[str, Callable[[], Any]] = {
        "path": lambda: read_weights(path),  # recipe=serve, and /update_weights_from_disk
        "init_from": lambda: load_weights(decoder, path),  # score and export too
        "loss.reference": lambda: load_weights(decoder, path, key="loss.reference"),
        "ckpt_path": lambda: check_weights(decoder, path, key="ckpt_path"),
    }
    for key, read in readers.items():
        with pytest.raises(
            Refusal, match=rf"{key}=.*\.metadata is refused, it names posix\.system, which no"
        ):
            read()
    for key in ("init_from", "ckpt_path"):
        write_files(tmp_path / key, files(1))
        with pytest.raises(Refusal, match=r"posix\.system"):
            library.run(replace(config_of(tmp_path / key), **{key: path}))
    torch.save({"a": Hostile(marker)}, tmp_path / "meta.pt")
    with pytest.raises(Refusal, match=r"ckpt_path: .*meta\.pt cannot be read"):
        load_plain_state(tmp_path, key="ckpt_path")
    assert not marker.exists()


def first_chunk(metadata: Metadata) -> ChunkStorageMetadata:
    entry: Any = metadata.state_dict_metadata[EMBEDDING]
    return entry.chunks[0]  # type: ignore[no-any-return]


def elsewhere(metadata: Metadata) -> None:
    metadata.storage_data = {
        index: replace(info, relative_path="../../etc/passwd")
        for index, info in metadata.storage_data.items()
    }


def behind(metadata: Metadata) -> None:
    metadata.storage_data = {
        index: replace(info, offset=info.offset + 10**9) for index, info in metadata.storage_data.items()
    }


def larger(metadata: Metadata) -> None:
    size = torch.Size([10**7, 10**5])
    metadata.state_dict_metadata[EMBEDDING].size = size  # type: ignore[union-attr]
    first_chunk(metadata).sizes = size


def in_part(metadata: Metadata) -> None:
    metadata.state_dict_metadata[EMBEDDING].chunks = []  # type: ignore[union-attr]


def absent(metadata: Metadata) -> None:
    metadata.storage_data = {}


def pickled(metadata: Metadata) -> None:
    metadata.state_dict_metadata[EMBEDDING] = BytesStorageMetadata()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (elsewhere, r"it names the file '\.\./\.\./etc/passwd'"),
        (behind, "an entry lies outside of __0_0.distcp"),
        (larger, r"tok_embeddings.weight of shape \(10000000, 100000\) is not what its files hold"),
        (in_part, "tok_embeddings.weight of shape .* is stored in part"),
        (absent, "is not what its files hold"),
    ],
)
def test_a_description_that_is_not_what_the_files_hold_is_refused(
    stored: Path, tmp_path: Path, change: Callable[[Metadata], None], reason: str
) -> None:
    metadata = dcp.FileSystemReader(stored).read_metadata()
    change(metadata)
    path = changed(stored, tmp_path, metadata)
    with pytest.raises(Refusal, match=rf"init_from={path}: \.metadata is refused, .*{reason}"):
        read_metadata(path, key="init_from")


def test_a_stored_value_in_place_of_a_tensor_is_never_unpickled(stored: Path, tmp_path: Path) -> None:
    metadata = dcp.FileSystemReader(stored).read_metadata()
    pickled(metadata)
    path = changed(stored, tmp_path, metadata)
    state = {"state_dict": {"decoder.tok_embeddings.weight": torch.zeros(MODEL.vocab_size, MODEL.dim)}}
    with pytest.raises(Refusal, match="as a pickled value, not as a tensor|cannot be read"):
        load_tensors(state, path, key="init_from", alone=True)


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x80\x04\x95" + b"\xff" * 8, b"(" * 10**6, b"\x96" + b"\xff" * 7]
)
def test_bytes_that_are_no_description_are_refused(stored: Path, tmp_path: Path, data: bytes) -> None:
    path = changed(stored, tmp_path, None)
    (path / ".metadata").write_bytes(data)
    with pytest.raises(Refusal, match=r"init_from=.*\.metadata is refused"):
        read_metadata(path, key="init_from")


def test_requests_name_weights_below_the_given_directories_only_and_learn_nothing_of_others(
    stored: Path, tmp_path: Path
) -> None:
    roots = [str(tmp_path / "allowed")]
    (tmp_path / "allowed").mkdir()
    shutil.copytree(stored, tmp_path / "allowed" / "step-1")
    (tmp_path / "allowed" / "link").symlink_to(stored)
    assert read_below(str(tmp_path / "allowed" / "step-1"), roots=roots)
    answers = set()
    for path in (
        str(stored),
        "/nowhere",
        "/etc",
        f"{roots[0]}/link",
        f"{roots[0]}/../x",
        "",
        f"{roots[0]}-2",
    ):
        with pytest.raises(Refusal) as caught:
            read_below(path, roots=roots)
        answers.add(str(caught.value))
    assert answers == {"the path of the weights: not below a directory of serve.weights_from"}


def test_a_checkpoint_with_one_changed_bit_is_refused_as_init_from_and_as_reference(
    stored: Path, tmp_path: Path
) -> None:
    shutil.copytree(stored, tmp_path / "step-1")
    shard = tmp_path / "step-1" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    write_files(tmp_path / "run", files(1))
    config = config_of(tmp_path / "run")
    loss = replace(config.loss, kl_coef=0.1, reference=str(tmp_path / "step-1"))
    for key, values in (
        ("init_from", {"init_from": str(tmp_path / "step-1")}),
        ("loss.reference", {"loss": loss}),
    ):
        with pytest.raises(Refusal, match=rf"{key}=.*__0_0\.distcp differs from its checksum"):
            library.run(replace(config, **values))


# Calls that may run what they read, by file, and why they do not.
DANGEROUS = ("pickle.load", "pickle.loads", "Unpickler", "torch.load", "np.load", "numpy.load", "yaml.load")
DANGEROUS += ("eval", "exec", "FileSystemReader", "dcp.load", "joblib.load", "marshal.loads", "shelve.open")
SAFE = {
    ("olmo_rl/policy/stored_checkpoint.py", "dcp.load"): "with our reader of the description, tensors only",
    ("olmo_rl/tasks/verdicts.py", "pickle.loads"): "of our own parent process, through a pipe",
}


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text())
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_no_call_of_the_source_may_run_what_it_reads() -> None:
    found = []
    for directory in ("olmo_rl", "recipes", "benchmarks"):
        for path in sorted((ROOT / directory).rglob("*.py")):
            for name, call in calls(path):
                if name not in DANGEROUS and not name.endswith(("pickle.load", "pickle.loads", ".Unpickler")):
                    continue
                given = {word.arg: ast.unparse(word.value) for word in call.keywords}
                safe = given.get("weights_only") == "True" or given.get("allow_pickle") == "False"
                if not safe and (str(path.relative_to(ROOT)), name) not in SAFE:
                    found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name}")
    assert found == []
