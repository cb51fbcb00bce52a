"""Supervised fine-tuning on chat data, or on a task's demonstrations: the same model, packer and update as
GRPO, cross-entropy loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback

from olmo_rl.chosen_checkpoint import resolve_checkpoint
from olmo_rl.collections.conversations import Conversations
from olmo_rl.collections.supervised import SupervisedDataModule, SupervisedSource, TaskDemonstrations
from olmo_rl.config import Config
from olmo_rl.data.chat_files import ChatStream, open_chat
from olmo_rl.data.inputs import Inputs
from olmo_rl.data.tokenizers import Tokenizer, fitting_tokenizer
from olmo_rl.run_directory import EXIT_INTERRUPTED
from olmo_rl.running.callbacks import ContractLog
from olmo_rl.running.closing import print_closing
from olmo_rl.running.held_out_loss import HeldOutLoss
from olmo_rl.running.trainer import fit
from olmo_rl.tasks.prompting import task_of
from olmo_rl.training.module import PolicyModule
from olmo_rl.training.step import SUPERVISED
from olmo_rl.training.strategy import ExpertParallelStrategy


def train(config: Config, *, inputs: Inputs | None = None, watchers: Sequence[Callback] = ()) -> None:
    """One rank, top to bottom. `inputs`: what the preflight read; `watchers` see the hooks of Lightning
    beside our own callbacks.
    """
    inputs = Inputs() if inputs is None else inputs
    checkpoint = resolve_checkpoint(config)
    strategy = ExpertParallelStrategy(config)
    module = PolicyModule(config, objective=SUPERVISED)
    tokenizer = fitting_tokenizer(config.model)
    assert config.batch.samples_per_step is not None, "refusals require batch.samples_per_step for recipe=sft"
    data = SupervisedDataModule(
        config,
        source=_source(config, inputs=inputs, tokenizer=tokenizer, strategy=strategy),
        samples_per_step=config.batch.samples_per_step,
    )
    contract = ContractLog(config.run_dir)
    held_out: list[Callback] = []
    if config.sft.eval_path is not None:
        held_out.append(
            HeldOutLoss(
                config, tokenizer=tokenizer, contract=contract, files=inputs.chats.get("sft.eval_path")
            )
        )
    trainer, interrupted = fit(
        config,
        strategy=strategy,
        module=module,
        data=data,
        contract=contract,
        evaluations=[*held_out, *watchers],
        checkpoint=checkpoint,
    )
    if trainer.is_global_zero:
        print_closing(config, interrupted=interrupted)
    if interrupted:
        raise SystemExit(EXIT_INTERRUPTED)


def _source(
    config: Config, *, inputs: Inputs, tokenizer: Tokenizer, strategy: ExpertParallelStrategy
) -> SupervisedSource:
    sft = config.sft
    if sft.path is None:
        task = task_of(config, tokenizer=tokenizer, problems=inputs.problems)
        return TaskDemonstrations(config, task=task, tokenizer=tokenizer, strategy=strategy)
    stream = ChatStream(
        inputs.chats.get("sft.path") or open_chat(sft.path, config=sft, key="sft.path", split=sft.split),
        seed=config.seed,
        shuffle_buffer=sft.shuffle_buffer,
        epochs=sft.epochs,
    )
    return Conversations(config, stream=stream, tokenizer=tokenizer, strategy=strategy)
