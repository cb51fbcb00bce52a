"""Logits of the Olmo3Moe modeling file of the ai2-olmo-core wheel, and the tensors of its models. A process
of its own, since it needs transformers 5.2: `python olmo3moe_peer.py SITE DIRECTORY...` with the peer's
packages in SITE, one Hugging Face directory and `tokens.pt` (a list of documents) in each DIRECTORY, adds
`peer.pt`: logits of every document, or None, and shapes by name.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import torch


def main(site: str, directories: list[str]) -> None:
    sys.path.insert(0, site)
    # The package itself imports much that the modeling file does not need.
    package = types.ModuleType("olmo3moe_hf")
    package.__path__ = [str(Path(site) / "olmo_core" / "nn" / "moe" / "v2" / "hf")]
    sys.modules["olmo3moe_hf"] = package
    configuration = importlib.import_module("olmo3moe_hf.configuration_olmo3moe").Olmo3MoeConfig
    modeling = importlib.import_module("olmo3moe_hf.modeling_olmo3moe").Olmo3MoeForCausalLM
    for name in directories:
        directory = Path(name)
        config = configuration.from_pretrained(directory / "hf")
        with torch.device("meta"):
            shapes = {key: tuple(x.shape) for key, x in modeling(config).state_dict().items()}
        found = {"shapes": shapes, "logits": None}
        if "linear_attention" not in config.layer_types:
            model, told = modeling.from_pretrained(
                directory / "hf", dtype=torch.float32, output_loading_info=True
            )
            assert not any(told.values()), told
            model.eval()
            with torch.no_grad():
                documents = torch.load(directory / "tokens.pt")
                found["logits"] = [model(tokens[None], use_cache=False).logits[0] for tokens in documents]
        torch.save(found, directory / "peer.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
