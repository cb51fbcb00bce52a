"""Full disks under every writer: refused with what is needed and what is free, and nothing is left half."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_cases import LAYOUT, samples_of

from olmo_rl.complete_files import write_complete
from olmo_rl.data.files import write_collection
from olmo_rl.full_disks import full_disks_refused
from olmo_rl.hf.weight_files import write_directory
from olmo_rl.policy.weights import save_weights
from olmo_rl.types import Collection, Refusal

MIB = 2**20


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path_factory.mktemp("disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def large_collection() -> Collection:
    """Tokens that compression leaves as large as they are."""
    samples = samples_of()
    noise = torch.randint(2**24, (2 * MIB,), generator=torch.Generator().manual_seed(0))
    prompt = "".join(map(chr, (33 + noise % 90).tolist()))
    return Collection(
        samples=[replace(sample, prompt=prompt) for sample in samples], layout=LAYOUT, source="test"
    )


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda place: write_complete(place / "text.json", "x" * 2 * MIB),
    "weights": lambda place: save_weights({"w": torch.zeros(MIB)}, place / "w.safetensors"),
    "directory": lambda place: write_directory(
        place / "hf",
        documents={"config.json": {}},
        shards=iter([{"w": torch.zeros(MIB)}]),
        count=1,
        save=None,
    ),
    "collection": lambda place: write_collection(large_collection(), place / "c.parquet"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_finds_no_space_is_refused_with_numbers_and_leaves_nothing(
    small_disk: Path, name: str
) -> None:
    with pytest.raises(Refusal) as caught:
        WRITERS[name](small_disk)
    (reason,) = caught.value.reasons
    assert reason.startswith(f"disk full: {small_disk}/")
    if name in ("weights", "directory"):
        assert " needs 4.0 MiB, " in reason
    assert " of 1.0 MiB are free there: free space" in reason
    assert list(small_disk.iterdir()) == []


def test_only_a_full_disk_is_refused_as_one(tmp_path: Path) -> None:
    for error in (OSError(5, "Input/output error"), RuntimeError("os error 2"), KeyboardInterrupt()):
        with pytest.raises(type(error)), full_disks_refused(tmp_path):
            raise error
    quota = OSError(122, os.strerror(122), str(tmp_path / "x"))
    expected = r"x cannot be written, .* free there of this user \(a quota\): "
    with pytest.raises(Refusal, match=expected), full_disks_refused(tmp_path):
        raise quota
