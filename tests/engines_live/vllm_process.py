"""A real vLLM on this machine's CPU, and the model of ours that it serves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from bounds import BOUND_SECONDS
from chat_cases import UNMARKED, save_tokenizer
from composing import ROOT, compose

from olmo_rl.cli import run as run_command
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import save_weights

# Where `make test-engines` installs it.
HOME = Path(os.environ.get("OLMO_RL_VLLM", ROOT / "build" / "engines" / "vllm"))
MODEL = ("model=moe_tiny", "model.vocab_size=304", "model.tokenizer=tokenizer")
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
FLAGS = (
    "--dtype float32 --enforce-eager --max-model-len 64 --max-num-seqs 16 --gpu-memory-utilization 0.1 "
    "--enable-return-routed-experts"
)


def export(place: Path, *, top_k: int) -> Path:
    """A Qwen3-MoE of random weights by `recipe=export` in `place`, the working directory, with tokenizer and
    chat template; its `generation_config.json` then asks for `top_k`.
    """
    save_tokenizer(place / "tokenizer", template=UNMARKED)
    decoder = HybridDecoder(compose(*MODEL).model, attention="torch")
    decoder.init_weights(0)
    save_weights(
        {name: p.detach().clone() for name, p in decoder.named_parameters()}, place / "start.safetensors"
    )
    given = ("recipe=export", "run_name=export", "init_from=start.safetensors", "export.path=hf")
    assert run_command([*MODEL, *given]) == 0
    directory = place / "hf"
    assert (directory / "chat_template.jinja").read_text() == UNMARKED
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"top_k": top_k}))
    return directory


class Vllm:
    """`vllm serve` of a directory, at a port that stays; its output goes to `log`."""

    def __init__(self, directory: Path, *, log: Path) -> None:
        self.directory, self.log = directory, log
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        """Start it; healthy on return, unless nobody waits."""
        command = [str(HOME / "bin" / "vllm"), "serve", str(self.directory), "--host", "127.0.0.1"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--served-model-name", "tiny", *FLAGS.split()],
                env=os.environ | ENVIRONMENT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        began = time.monotonic()
        while wait and not self.healthy():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() - began < BOUND_SECONDS, self.log.read_text()[-4000:]
            time.sleep(1)
        print(f"\nvLLM {'is healthy after' if wait else 'started'} {time.monotonic() - began:.0f} s")

    def healthy(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        """kill -9 of the server and all its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
