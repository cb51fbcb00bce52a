"""Is this allocation fit for a run? `launch/preflight.sh` starts it, one process a rank of a later run.

Every rank reports its node: devices, driver, memory, the disk under `--directory`, a write, its clock. All of
them then run an all-reduce and an all-to-all and time them. Rank 0 prints a table, one line a node, and below
it each reason why a run would fail, with node and fix; then every rank exits with 2. Each wait is bounded by
`--seconds`. Works on CPUs (gloo) and GPUs (NCCL), alone, under torchrun and under srun.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median

from olmo_rl.config import Config, TrainerConfig
from olmo_rl.running.launchers import launched_rank, launched_world, rank_variables
from olmo_rl.types import Refusal

FAILED = 2
CLOCK_SECONDS = 5.0  # that clocks of nodes may differ by: leases and logs compare times
MEBIBYTE = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One rank's report. Sizes in bytes, times in seconds; `fault`: why its node cannot take part."""

    rank: int
    host: str
    gpus: bool
    devices: int
    device: str
    driver: str
    torch: str
    memory: int
    disk_free: int
    write: float | None
    sees_rank_0: bool = True
    all_reduce: float | None = None
    all_to_all: float | None = None
    clock: float = 0.0
    fault: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The requirements on every node: bytes that are free under the directory of runs."""

    disk_free: int
    directory: str = "outputs"


def faults(reports: Sequence[Report], *, limits: Limits) -> list[str]:
    """One line for everything that would break a run: node, reason, fix."""
    lines: list[str] = []
    first = {report.host: report for report in reversed(reports)}
    for host, report in sorted(first.items()):
        mine = [one for one in reports if one.host == host]
        lines += [f"{host}: rank {one.rank}: {one.fault}" for one in mine if one.fault is not None]
        if report.gpus and report.devices < len(mine):
            lines.append(
                f"{host}: {report.devices} GPUs for {len(mine)} ranks: give every node {len(mine)} "
                "(--gpus-per-node), or start fewer ranks a node"
            )
        if report.write is None:
            lines.append(
                f"{host}: {limits.directory} cannot be written: mount it there, or correct its permissions"
            )
        elif not all(one.sees_rank_0 for one in mine):
            lines.append(
                f"{host}: {limits.directory} is not the directory that rank 0 writes to: put it on a file "
                "system that all nodes share"
            )
        if report.disk_free < limits.disk_free:
            lines.append(
                f"{host}: {report.disk_free / 2**30:,.1f} GiB are free under {limits.directory}, "
                f"{limits.disk_free / 2**30:,.1f} are needed: free space there, or lower FREE_GIB"
            )
    middle = median(report.clock for report in reports)
    for host, report in sorted(first.items()):
        if abs(report.clock - middle) > CLOCK_SECONDS:
            lines.append(
                f"{host}: its clock is {report.clock - middle:+.1f} s off: synchronise it (chrony, ntp)"
            )
    for name in ("device", "driver", "torch") if any(report.gpus for report in reports) else ("torch",):
        values = [getattr(report, name) for report in reports]
        usual = max(values, key=values.count)
        lines += [
            f"{host}: {name} {getattr(report, name)}, elsewhere {usual}: use the same on all nodes"
            for host, report in sorted(first.items())
            if getattr(report, name) != usual
        ]
    return lines


class Meeting:
    """The ranks of this check, and the store by which they meet."""

    def __init__(self, variables: Mapping[str, str], *, seconds: float) -> None:
        """Raises Refusal where rank 0 cannot be reached in time."""
        from torch.distributed import DistError, TCPStore

        self.rank, self.world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        self.seconds = seconds
        address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=seconds)
        try:
            self.store = TCPStore(address, port, None, serves, limit, wait_for_workers=False)
        except (DistError, RuntimeError) as error:
            raise Refusal(
                f"{socket.gethostname()}: rank {self.rank} cannot reach rank 0 at {address}:{port} within "
                f"{seconds:.0f} s: check that name, the port and the firewall between the nodes"
            ) from error

    def exchange(self, name: str, value: str) -> list[str]:
        """The values of all ranks. Raises Refusal where one does not come in time, naming the ranks."""
        deadline = time.monotonic() + self.seconds
        self.store.set(f"{name}/{self.rank}", value)
        absent = [*range(self.world)]
        while absent and time.monotonic() < deadline:
            absent = [rank for rank in absent if not self.store.check([f"{name}/{rank}"])]
            if absent:
                time.sleep(0.05)
        if absent:
            ranks = ", ".join(map(str, absent[:8]))
            raise Refusal(
                f"{socket.gethostname()}: rank {self.rank} waited {self.seconds:.0f} s in vain for rank "
                f"{ranks} of {self.world} ({name}): look at the node and the log of that rank"
            )
        return [self.store.get(f"{name}/{rank}").decode() for rank in range(self.world)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Check this node together with all others; exits with 2 where a run would fail."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", default="outputs", help="of runs; all nodes share it")
    parser.add_argument("--free-gib", type=float, default=20.0, help="that its disk must have")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of each wait")
    parser.add_argument("--mib", type=int, default=64, help="of the tensors in collectives, a rank")
    options = parser.parse_args(arguments)
    try:
        lines = check(options)
    except Refusal as refusal:
        lines = list(refusal.reasons)
        print("\n".join(["preflight failed:", *(f"  {line}" for line in lines)]), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if lines:
        os._exit(FAILED)  # a collective that hangs would keep this process


def check(options: argparse.Namespace) -> list[str]:
    """What would break a run; rank 0 prints it. Raises Refusal where the ranks do not come together."""
    variables = _variables()
    meeting = Meeting(variables, seconds=options.seconds)
    directory = Path(options.directory)
    token = directory / f".preflight-{variables['MASTER_PORT']}"
    report = examine(meeting.rank, directory=directory, token=token)
    meeting.exchange("examined", "")
    report = replace(report, clock=time.time(), sees_rank_0=token.exists() or report.write is None)
    report = with_collectives(report, meeting=meeting, mib=options.mib, local=int(variables["LOCAL_RANK"]))
    found = meeting.exchange("report", json.dumps(asdict(report)))
    reports = [Report(**json.loads(one)) for one in found]
    limits = Limits(disk_free=int(options.free_gib * 2**30), directory=options.directory)
    lines = faults(reports, limits=limits)
    if meeting.rank == 0:
        with suppress(OSError):
            token.unlink()
        show(reports, lines=lines)
    meeting.exchange("end", "")
    if meeting.rank == 0 and meeting.world > 1:
        time.sleep(1.0)  # this process may serve the store: the others read their last answers
    return lines


def _variables() -> Mapping[str, str]:
    """torchrun's variables of this rank, which may be the only one."""
    environ, world = os.environ, launched_world(os.environ)
    if launched_rank(environ) is None:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        return {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    layout = environ.get("LOCAL_WORLD_SIZE") or environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    local = int(layout.partition("(")[0])
    config = Config(trainer=TrainerConfig(devices=local, num_nodes=world // local))
    found = rank_variables(environ, config=config)
    assert found is not None
    return {**environ, **found}


def examine(rank: int, *, directory: Path, token: Path) -> Report:
    """This rank's node, before any rank meets another."""
    import torch

    write, free = None, 0
    probe = directory / f".preflight-{socket.gethostname()}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with probe.open("wb") as file:
            file.write(b"\0" * 16 * MEBIBYTE)
            file.flush()
            os.fsync(file.fileno())
        write = time.perf_counter() - began
        probe.unlink()
        if rank == 0:
            token.touch()
        free = shutil.disk_usage(directory).free
    except OSError:
        probe.unlink(missing_ok=True)
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        devices, name, memory, driver = torch.cuda.device_count(), device.name, device.total_memory, _driver()
    else:
        devices, name = len(os.sched_getaffinity(0)), "CPU cores"
        memory, driver = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), platform.release()
    return Report(
        rank=rank,
        host=_host(),
        gpus=torch.cuda.is_available(),
        devices=devices,
        device=name,
        driver=driver,
        torch=torch.__version__,
        memory=memory,
        disk_free=free,
        write=write,
    )


def _host() -> str:
    """SLURM's name of this node, which its commands take, else the system's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def with_collectives(report: Report, *, meeting: Meeting, mib: int, local: int) -> Report:
    """The report with the seconds of an all-reduce and an all-to-all of all ranks, the second of two each."""
    import torch
    import torch.distributed as dist

    if meeting.world == 1:
        return report
    backend, device = ("nccl", torch.device("cuda", local)) if report.gpus else ("gloo", torch.device("cpu"))
    stage = "the meeting"
    try:
        if report.gpus:
            torch.cuda.set_device(device)
        limit = timedelta(seconds=meeting.seconds)
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else a wait for NCCL ends the process
        dist.init_process_group(
            backend, store=meeting.store, rank=meeting.rank, world_size=meeting.world, timeout=limit
        )
        stage = f"an all-reduce over {backend}"
        values = torch.full((mib * MEBIBYTE // 4,), float(meeting.rank + 1), device=device)
        reduced = _seconds(lambda: dist.all_reduce(values))
        factor = meeting.world * (meeting.world + 1) / 2 * meeting.world  # of two all-reduces
        right = values[0].item() == values[-1].item() == factor
        stage = f"an all-to-all over {backend}"
        rows = mib * MEBIBYTE // 4 // meeting.world
        sent = torch.full((rows * meeting.world,), float(meeting.rank), device=device)
        got = torch.empty_like(sent)
        exchanged = _seconds(lambda: dist.all_to_all_single(got, sent))
        right = right and got[::rows].tolist()[: meeting.world] == [*map(float, range(meeting.world))]
        dist.destroy_process_group()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        fault = f"{stage} failed, {reason}: check the network between nodes (NCCL_DEBUG, NCCL_SOCKET_IFNAME)"
        return replace(report, fault=fault)
    wrong = None if right else f"collectives over {backend} return wrong numbers: take the node out of use"
    return replace(report, all_reduce=reduced, all_to_all=exchanged, fault=wrong)


def _seconds(collective: Callable[[], object]) -> float:
    """Wall time of the second of two runs; the first one connects the ranks."""
    import torch

    began = 0.0
    for _ in range(2):
        began = time.perf_counter()
        collective()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return time.perf_counter() - began


def show(reports: Sequence[Report], *, lines: Sequence[str]) -> None:
    """The table, one line a node, and what is wrong."""
    from rich.console import Console
    from rich.table import Table

    hosts = sorted({report.host for report in reports})
    table = Table(title=f"{len(reports)} ranks on {len(hosts)} nodes", title_justify="left")
    for heading in ("node", "ranks", "devices", "driver", "torch", "memory", "all-reduce", "all-to-all"):
        table.add_column(heading)
    for heading in ("disk free", "write", "clock"):
        table.add_column(heading)
    middle = median(report.clock for report in reports)
    for host in hosts:
        mine = [report for report in reports if report.host == host]
        one = mine[0]
        table.add_row(
            host,
            ", ".join(str(report.rank) for report in mine),
            f"{one.devices} {one.device}",
            one.driver,
            one.torch,
            f"{one.memory / 2**30:,.0f} GiB",
            *(_slowest([getattr(report, name) for report in mine]) for name in ("all_reduce", "all_to_all")),
            f"{one.disk_free / 2**30:,.0f} GiB",
            "failed" if one.write is None else f"{16 / one.write:,.0f} MiB/s",
            f"{one.clock - middle:+.1f} s",
        )
    console = Console(width=160 if not sys.stdout.isatty() else None)
    console.print(table)
    if lines:
        print(
            "\n".join([f"preflight failed, {len(lines)} reasons:", *(f"  {line}" for line in lines)]),
            flush=True,
        )
    else:
        print("preflight passed", flush=True)


def _slowest(seconds: Sequence[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{max(known):.3f} s" if known else "-"


if __name__ == "__main__":
    main()
