"""Files of strangers run no code, whoever reads them: checkpoints through every key and over HTTP."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from documents import ROOT
from test_chat import hf
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata
from training_cases import MODEL, config_of, files, write_files

from olmo_rl import library
from olmo_rl.data import chat, parquet
from olmo_rl.data.bounded import within_seconds
from olmo_rl.data.chat import user_prompt
from olmo_rl.data.files import read_collection
from olmo_rl.data.tokenizers import load_tokenizer
from olmo_rl.hf.formats import read_config
from olmo_rl.hf.weight_files import HfFiles
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


QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            json.dumps(QWEN3 | {"num_hidden_layers": 10**10}),
            "num_hidden_layers=10000000000 is not at most 10000",
        ),
        (
            json.dumps(QWEN3 | {"num_experts_per_tok": 10**9}),
            "num_experts_per_tok=1000000000 is not at most 32767",
        ),
        (json.dumps(QWEN3 | {"num_experts": 10**9}), "num_experts=1000000000 is not at most 32767"),
        (json.dumps(QWEN3 | {"vocab_size": 10**12}), "vocab_size=1000000000000 is not at most"),
        ("[" * 10**5 + "]" * 10**5, "nested too deeply"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "cannot be read"),
    ],
)
def test_sizes_and_depths_of_a_config_are_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Refusal, match=f"init_from={tmp_path}: config.json.*{reason}"):
        read_config(tmp_path)


def test_headers_and_indices_of_weight_files_are_refused_by_name(tmp_path: Path) -> None:
    for size in (2**60, 10**7, 8):
        (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(Refusal, match=r"model\.safetensors is missing, cut or no safetensors file"):
            HfFiles(directory=tmp_path, key="init_from").__enter__()
    (tmp_path / "model.safetensors.index.json").write_text("[" * 10**5)
    with pytest.raises(
        Refusal, match=r"model\.safetensors\.index\.json cannot be read \(nested too deeply\)"
    ):
        HfFiles(directory=tmp_path, key="init_from").__enter__()


def test_a_rollout_file_that_announces_too_many_rows_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, files(1))
    (path,) = (tmp_path / "files").iterdir()
    monkeypatch.setattr(parquet, "MOST_ROWS", 7)
    with pytest.raises(Refusal, match=f"{path}: it announces 8 rows and .* at most 7 and"):
        read_collection(path, require_routes=True)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_chat_template_that_does_not_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.3)
    with pytest.raises(Refusal, match="the chat template does not end within 0 s"):
        user_prompt("hi", tokenizer=hf(tmp_path, ENDLESS), system=None)
    monkeypatch.setattr(chat, "LONGEST_TEXT", 100)
    with pytest.raises(Refusal, match="the chat template makes 1000 characters of one conversation"):
        user_prompt("hi", tokenizer=hf(tmp_path, "{{ 'a' * 1000 }}"), system=None)


def test_a_call_that_ends_in_time_is_left_alone_and_memory_has_a_limit_before_a_run() -> None:
    assert within_seconds(lambda: 7, seconds=30.0, what="it") == 7
    program = (
        "from olmo_rl.data.bounded import within_memory\n"
        "try:\n"
        "    with within_memory(2**28):\n"
        "        'a' * 2**33\n"
        "except MemoryError:\n"
        "    print(len('a' * 2**29))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == f"{2**29}\n"


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
@pytest.mark.parametrize("data", [b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"GGUF\x03\0\0\0" + b"\xff" * 7])
def test_a_cut_gguf_header_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(Refusal, match=f"model.tokenizer={tmp_path}/a.gguf: "):
        load_tokenizer(str(tmp_path / "a.gguf"))


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
