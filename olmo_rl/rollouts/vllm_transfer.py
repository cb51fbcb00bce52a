"""The trainer's side of vLLM's weight transfer, backend nccl, unpacked: `vllm serve --weight-transfer-config
'{"backend": "nccl"}'`, 0.32.0 or newer.

`/init_weight_transfer_engine` has an engine join an NCCL group by the id that rank 0 made
(`nccl_unique_id_b64`); joined, all ranks add up one element, as vLLM's communicator does. Between
`/start_weight_update` and `/finish_weight_update` every `/update_weights` names tensors that rank 0 then
broadcasts one by one. The bodies are held to vLLM's classes; the transfer itself needs two GPUs and has not
run.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from olmo_rl.rollouts.collective import Call, Invitation


@dataclass(kw_only=True, slots=True, eq=False)
class NcclGroup:
    """Rank 0 of one communicator. Its calls block until the device has done them."""

    communicator: Any
    device: torch.device

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            for tensor in tensors:
                nccl.broadcast([tensor.contiguous()], streams=[stream], comms=[self.communicator])
            stream.synchronize()

    def close(self) -> None:
        """The communicator ends with its last reference."""
        self.communicator = None


def joined(unique_id: bytes, *, world_size: int, device: torch.device) -> NcclGroup:
    """Meet the ranks of one engine; blocks until all are there."""
    with torch.cuda.device(device):
        communicator = nccl.init_rank(world_size, unique_id, 0)
        stream = torch.cuda.current_stream()
        one = torch.zeros(1, device=device)
        nccl.all_reduce([one], streams=[stream], comms=[communicator])
        stream.synchronize()
    return NcclGroup(communicator=communicator, device=device)


class VllmWords:
    """The calls of vLLM."""

    def invite(self, name: str, *, url: str, world_size: int, device: torch.device) -> Invitation:
        del url  # the id names the address of rank 0
        unique_id = bytes(nccl.unique_id())
        info = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": world_size,
            "packed": False,
        }
        return Invitation(
            name=name,
            call=("/init_weight_transfer_engine", {"init_info": info}),
            join=partial(joined, unique_id, world_size=world_size, device=device),
        )

    def begin(self) -> Call | None:
        return "/start_weight_update", {}

    def announce(self, name: str, tensors: Mapping[str, Tensor], *, version: int) -> Call:
        del name, version
        info = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        return "/update_weights", {"update_info": info}

    def end(self, version: int) -> Call | None:
        return "/finish_weight_update", {"weight_version": str(version)}
