"""What every test runs under: one thread, no launcher. The time limit of a test stands in pyproject.toml."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from warm_python import forked_commands

# Before torch is imported, here and in every process that a test starts: two cores, several processes. What
# inductor compiles is kept between runs; numba's kernels are kept beside their sources. Whether g++ knows the
# vector instructions of this CPU need not be tried in five compilations.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / "outputs" / ".cache" / "inductor")
)
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# How fast examples are drawn and run is a measure of the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# A suite under nohup must not hand its ignored SIGHUP on to processes that a test signals.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# A suite that runs inside a SLURM job or under torchrun must not believe that it is one of the ranks.
for _name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
    del os.environ[_name]
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)

# Files that take longest, in the order in which workers get them: what is left for the end is short.
LONGEST_FIRST = (
    "test_topologies.py",
    "test_recipes.py",
    "test_doc_commands.py",
    "test_engine_runs.py",
    "test_judging.py",
    "test_distributed.py",
    "test_seeded_faults.py",
    "test_balancing.py",
    "test_numbered_runs.py",
    "test_node_check.py",
    "test_processes.py",
    "test_serving.py",
    "test_engines.py",
    "test_interop_recipes.py",
    "test_checkpoints.py",
    "test_pending.py",
    "test_update.py",
    "test_compile.py",
    "test_launch.py",
    "test_with_engines.py",
    "test_validate.py",
    "test_two_ranks.py",
    "test_titan.py",
    "test_library.py",
    "test_engine_faults.py",
    "test_torchrun.py",
    "test_search.py",
    "test_one_pass.py",
    "test_kernel_cache.py",
)


def pytest_collection_finish() -> None:
    """Keep what was imported out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


VERIFIER = '''
def odd(response: str, answer: str) -> float:
    """A verifier that an untrained policy satisfies now and then."""
    return float(len(response) % 2)
'''


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files, and keep the order of tests within each."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Python commands of one file, and the ranks that they or the tests start, fork instead of importing."""
    with forked_commands():
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of the commands of one file, with a task of the user's own."""
    place = tmp_path_factory.mktemp("place")
    (place / "own_verifier.py").write_text(VERIFIER)
    lines = [json.dumps({"prompt": f"{'ab' * (i % 5)}{i}?", "answer": str(i)}) for i in range(60)]
    (place / "problems.jsonl").write_text("\n".join(lines) + "\n")
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)
