"""What a terminal shows of a run: phase, time left, the figures of the last update, seconds by phase, and a
response now and then. Plain lines where output is no terminal.

A thread of rich draws twice a second from values that the training thread assigns; training waits for
nothing of it.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typing_extensions import override

from olmo_rl.data.packs import Step
from olmo_rl.progress import Progress, current, follow
from olmo_rl.training.module import PolicyModule
from olmo_rl.types import Sample

LINE_INTERVAL = 10  # updates between plain lines
SAMPLE_INTERVAL = 50  # updates between responses among plain lines
REFRESHES = 2.0  # a second
_RECENT = 20  # updates that predict the time left
_INSIDE = re.compile(r"(?<! ) (?! )")
_BLOCKS = "▁▂▃▄▅▆▇█"
# Words for phases as notes name them; a phase that is not here stands for itself.
PHASES = {
    "start": "starting",
    "load": "loading weights",
    "rollout": "generating",
    "plan": "planning",
    "transfer": "moving packs",
    "score": "scoring",
    "forward": "forward",
    "backward": "backward",
    "clip": "clipping gradients",
    "optimizer": "optimizer step",
    "publish": "publishing weights",
    "evaluate": "evaluating",
    "save": "saving a checkpoint",
}
FIGURES = (
    ("reward", "reward/mean", ".3f"),
    ("loss", "loss/cross_entropy", ".4f"),
    ("length", "rollouts/response_tokens", ",.1f"),
    ("entropy", "policy/entropy", ".3f"),
    ("KL", "loss/ref_kl", ".2g"),
    ("grad", "grad/norm", ".3g"),
    ("mismatch", "mismatch/mean", ".2g"),
    ("fill", "packing/fill", ".0%"),
    ("lag", "rollouts/lag", ".2g"),
    ("tokens/s", "throughput/real_tokens_per_second", ",.0f"),
)


@dataclass(kw_only=True, slots=True)
class Shown:
    """What is known of a run. `values`: the newest value of every metric; `rewards`: of the last updates;
    `sample`: a response of the last update; `seconds`: of the last updates, from end to end.
    """

    label: str
    total: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    values: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=24))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    sample: Sample | None = None

    @property
    def left(self) -> float | None:
        """Seconds to the last update at the pace of recent ones; None before the first has ended."""
        if not self.seconds:
            return None
        return (self.total - self.done) * sum(self.seconds) / len(self.seconds)


def head_of(shown: Shown, *, progress: Progress | None, now: float) -> str:
    """How far the run is, what it does now, and how long it will take."""
    width = 20
    filled = min(width, width * shown.done // max(1, shown.total))
    parts = [f"{shown.label} {'━' * filled}{'·' * (width - filled)} {shown.done}/{shown.total}"]
    if progress is not None:
        phase = PHASES.get(progress.phase, progress.phase)
        inside = progress.phase in ("forward", "backward", "transfer") and progress.pack is not None
        parts.append(f"{phase}, pack {progress.pack} of {progress.packs}" if inside else phase)
    left = "" if shown.left is None else f", {duration(shown.left)} left"
    parts.append(f"{duration(now - shown.started)} gone{left}")
    return "  ".join(parts)


def figures_of(values: Mapping[str, float]) -> str:
    """The figures of an update that an engineer looks at first; unknown ones are left out."""
    parts = [f"{word} {values[name]:{form}}" for word, name, form in FIGURES if name in values]
    clips = [values[name] for name in ("loss/clip_low", "loss/clip_high") if name in values]
    if clips:
        parts.append(f"clipped {sum(clips):.1%}")
    return "  ".join(parts)


def seconds_of(values: Mapping[str, float]) -> str:
    """Seconds of the last update by phase, those below a hundredth left out."""
    named = {
        name.removeprefix("time/").removesuffix("_s"): seconds
        for name, seconds in values.items()
        if name.startswith("time/") and name.endswith("_s") and name != "time/update_s"
    }
    if "time/plan_ms" in values:
        named["plan"] = values["time/plan_ms"] / 1000
    order = [*PHASES, *sorted(set(named) - set(PHASES))]
    parts = [f"{name} {named[name]:.2f}" for name in order if named.get(name, 0.0) >= 0.01]
    return "" if not parts else f"seconds: {'  '.join(parts)}"


def spark(values: Sequence[float]) -> str:
    """A curve of values in one line of text; nothing for less than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)


def sample_line(sample: Sample, *, width: int) -> str:
    """A response with its prompt and reward on one line of at most `width` characters."""
    reward = f"{sample.reward:.3g}"
    head = f"response (reward {reward}): "
    room = max(16, width - len(head) - 5)
    prompt = _clipped(sample.prompt or "", room // 2)
    return f"{head}{prompt} -> {_clipped(sample.response or '', room - len(prompt))}"


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _clipped(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= width - 2 else f"{flat[: max(1, width - 5)]}...")


class ProgressDisplay(Callback):
    """The display of a trainer, on rank 0 alone; of its updates, `total` in all."""

    def __init__(self, *, label: str, total: int, console: Console | None = None) -> None:
        self.shown = Shown(label=label, total=total)
        self._console = Console() if console is None else console
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._ended = 0.0
        self._lines = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start before weights are loaded, which takes minutes for large ones."""
        if not trainer.is_global_zero:
            return
        self.shown.started = self._ended = time.monotonic()
        if not self._console.is_terminal:
            print(f"{self.shown.label} {trainer.global_step}/{self.shown.total}  loading weights", flush=True)
            return
        self._progress = current()
        if self._progress is None:  # a run of one rank reports to nobody else
            self._progress = Progress()
            follow(self._progress)
        self._live = Live(
            get_renderable=self._picture, console=self._console, refresh_per_second=REFRESHES, transient=True
        )
        self._live.start()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.shown.done, self._ended = trainer.global_step, time.monotonic()

    def _picture(self) -> Group:
        """The lines of this moment, cut to the width of the terminal."""
        shown, width = self.shown, self._console.width
        lines = [head_of(shown, progress=self._progress, now=time.monotonic())]
        if shown.values:
            lines += [f"{figures_of(shown.values)}  {spark(list(shown.rewards))}", seconds_of(shown.values)]
        if shown.sample is not None:
            lines.append(sample_line(shown.sample, width=width))
        # A figure and its word stay on one line: they are a space apart, figures are two.
        return Group(*(Text(_INSIDE.sub("\u00a0", line)) for line in lines if line))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Step, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        module, shown, now = cast(PolicyModule, pl_module), self.shown, time.monotonic()
        moved = trainer.global_step > shown.done
        if moved:
            shown.seconds.append(now - self._ended)
        shown.done, self._ended = trainer.global_step, now
        shown.values = shown.values | module.logged  # a new one: the thread that draws walks through the old
        if moved and "reward/mean" in module.logged:
            shown.rewards.append(module.logged["reward/mean"])
        shown.sample = _response(module) or shown.sample
        if self._live is None and not self._console.is_terminal:
            self._print(module)

    def _print(self, module: PolicyModule) -> None:
        shown = self.shown
        if module.result is None:
            skipped = f"nothing to train on, {module.skipped_updates} updates skipped"
            print(f"{shown.label} {shown.done}/{shown.total}  {skipped}", flush=True)
            return
        last = shown.done == shown.total
        if shown.done % LINE_INTERVAL == 0 or last or self._lines == 0:
            self._lines += 1
            left = "" if last or shown.left is None else f"  {duration(shown.left)} left"
            print(f"{shown.label} {shown.done}/{shown.total}{left}  {figures_of(shown.values)}", flush=True)
        if shown.done % SAMPLE_INTERVAL == 0 and shown.sample is not None:
            print(f"  {sample_line(shown.sample, width=110)}", flush=True)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop as well: Lightning tears nothing down where a fit raises."""
        self._stop()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            self._console.print(self._picture())


def _response(module: PolicyModule) -> Sample | None:
    """A kept response of the last update with a text, of highest and lowest reward by turns."""
    result = module.result
    if result is None or result.totals.kept is None:
        return None
    samples = [result.step.samples[place] for place in result.totals.kept.positions]
    written = [sample for sample in samples if sample.response is not None]
    if not written:
        return None
    return written[-1] if module.trainer.global_step % 2 else written[0]
