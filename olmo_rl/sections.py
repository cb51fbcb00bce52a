"""The sections of the configuration: one schema for every choice of a group, defaults as we would use them.

YAML under `conf/` states only differences. `null` in YAML is None here. The comment behind a field is its
documentation: `python train.py --help` prints it. What no configuration may ask for stands in refusals/.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from olmo_rl.choices import (
    Attention,
    AuxGrouping,
    BalanceKind,
    BalanceLevel,
    BlockNorms,
    CountSource,
    Dtype,
    Filter,
    KlEstimator,
    LayerType,
    LinearAttention,
    LoggerKind,
    LogprobKind,
    LossKind,
    OnNonfinite,
    OnVerifierFailure,
    Overlong,
    PackingKind,
    PublicationKind,
    QkNorm,
    Recompute,
    Reduction,
    ScoreFunction,
    ScoringMode,
    SftFormat,
    Source,
    StrategyKind,
    TaskKind,
    WeightBound,
    WeightLevel,
)
from olmo_rl.types import ExpertLayout


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A hybrid decoder: mixers by layer type, dense or routed feed-forward by layer index."""

    vocab_size: int = 259  # bytes and three special ids
    dim: int = 128  # width of the residual stream
    layer_types: list[LayerType] = field(default_factory=lambda: [LayerType.full_attention] * 2)  # mixers
    dense_layers: list[int] = field(default_factory=list)  # global layer ids with a dense feed-forward
    dense_hidden: int = 256  # width of a dense feed-forward
    num_heads: int = 4  # query heads
    num_kv_heads: int = 4  # key and value heads, divides num_heads
    head_dim: int = 32  # width of one attention head
    qk_norm: QkNorm = QkNorm.head  # RMSNorm of queries and keys
    block_norms: BlockNorms = BlockNorms.before  # where the RMSNorms of a block stand
    rope_theta: float | None = 10000.0  # null = no rotary embedding
    sliding_window: int = 64  # tokens, the current one included
    kda_heads: int = 4  # heads of a linear attention layer
    kda_head_dim: int = 32  # width of one linear attention head
    conv_size: int = 4  # taps of the short convolution
    kda_negative_eigenvalues: bool = False  # beta in (0, 2) instead of (0, 1)
    num_experts: int = 8  # 0 = every layer is dense
    top_k: int = 2  # experts of one token
    expert_hidden: int = 128  # width of one routed expert
    shared_hidden: int = 0  # width of the shared expert, 0 = none
    latent_dim: int | None = None  # width of routed tokens, null = dim
    latent_norm: bool = False  # RMSNorm of the combined latent before it is projected up
    score_function: ScoreFunction = ScoreFunction.softmax  # router scores from logits
    route_norm: bool = True  # gate weights of one token sum to 1 before scaling
    route_scale: float = 1.0  # factor on gate weights
    max_seq_len: int = 1024  # tokens of one document
    norm_eps: float = 1e-6  # epsilon of every RMSNorm
    tie_embeddings: bool = False  # the output head is the embedding
    init_std: float = 0.02  # standard deviation of initial weights
    tokenizer: str = "bytes"  # bytes, a Hugging Face directory or name, a .gguf file, or package:NAME

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Global ids of the layers with routed experts."""
        if self.num_experts == 0:
            return ()
        return tuple(i for i in range(len(self.layer_types)) if i not in self.dense_layers)

    @property
    def expert_layout(self) -> ExpertLayout | None:
        """What recorded routes refer to; None without experts."""
        if not self.routed_layers:
            return None
        return ExpertLayout(num_experts=self.num_experts, top_k=self.top_k, routed_layers=self.routed_layers)


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Prompts and their verifier."""

    kind: TaskKind = TaskKind.addition  # where problems come from
    name: str | None = None  # reasoning_gym: dataset name
    parameters: dict[str, Any] = field(default_factory=dict)  # passed to the dataset
    path: str | None = None  # jsonl: lines with prompt and answer
    chat: bool = False  # prompts are turns of a user, written by the chat template of model.tokenizer
    system: str | None = None  # chat: the turn of the system, null = what the template has by itself
    verifier: dict[str, Any] = field(default_factory=dict)  # jsonl: _target_ and arguments; {} = exact match
    verifiers: dict[str, Any] = field(default_factory=dict)  # jsonl: the same by the domain of a line
    verifier_seconds: float | None = None  # jsonl: time limit of one judgement, null = none
    on_verifier_failure: OnVerifierFailure = OnVerifierFailure.refuse  # jsonl: raised, or out of time
    eval_problems: int = 200  # held-out problems, never trained on
    eval_interval: int = 50  # updates between evaluations, 0 = none


@dataclass(kw_only=True, slots=True)
class RolloutsConfig:
    """Where collections come from."""

    source: Source = Source.local  # the local engine, serving engines, or recorded files
    path: str | None = None  # files: one file, or a directory read in name order
    collections: int = 1  # recipe=rollout: how many to write
    group_size: int = 8  # generated: responses of one prompt
    max_new_tokens: int = 16  # generated: response length limit
    temperature: float = 1.0  # generated: of sampling
    top_p: float = 1.0  # generated: of sampling
    max_attempts: int = 4  # generated: rounds to fill one collection
    max_lag: int | None = None  # optimizer steps from behaviour to the update, older samples go; null = any
    urls: list[str] = field(default_factory=list)  # vllm, sglang: addresses of engines, http://host:port
    served_model: str | None = None  # vllm, sglang: name of the model there, null = the first that is named
    concurrency: int = 64  # vllm, sglang: requests under way at once, for each rank
    timeout_seconds: float = 600.0  # vllm, sglang: of one request, and of waiting for an engine that works
    retries: int = 4  # vllm, sglang: further attempts of one request, elsewhere where possible
    publication: PublicationKind = PublicationKind.directory  # vllm, sglang: how engines get new weights
    engine_ranks: int = 1  # publication=collective: GPUs of one engine, tp x dp of SGLang


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """recipe=export: a Hugging Face directory of the weights in init_from."""

    path: str | None = None  # directory to write, which must not exist; null = hf/ in the run directory
    dtype: Dtype = Dtype.float32  # of the written weights
    shard_gib: float = 4.0  # largest size of one safetensors file, in GiB


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    """recipe=serve: the local engine behind the HTTP API of serving engines."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # 0 = any free one, which is printed


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """The optimizer batch over all ranks."""

    samples_per_step: int | None = 512  # null = the whole collection
    steps_per_collection: int = 1  # updates from one collection
    filter: Filter = Filter.drop  # what happens to filtered samples
    filter_zero_variance: bool = False  # groups whose rewards are all equal
    max_skips: int = 100  # steps in a row without anything to train on, before the run is refused
    filter_truncated: bool = False  # responses cut at max_new_tokens


@dataclass(kw_only=True, slots=True)
class PackingConfig:
    """How samples become rows."""

    kind: PackingKind = PackingKind.none  # one sample per forward, or consecutive samples up to the budget
    max_tokens: int | None = None  # budget of one pack in tokens, null = model.max_seq_len
    pad_to_multiple_of: int = 1  # tokens of a row, divides the budget; pads repeat the pack's own documents
    pad_to_budget: bool = False  # every row as long as the budget
    pad_id: int = 0  # token of pads where every document of a pack has placeholders, and none is repeated


@dataclass(kw_only=True, slots=True)
class BalanceConfig:
    """The planner. Lower counts do not establish faster training: measure before you turn it on."""

    kind: BalanceKind = BalanceKind.none  # none keeps the order of arrival
    level: BalanceLevel = BalanceLevel.cells  # permute the batch, or set pack boundaries too
    proposals: int | None = None  # null = the search's own default
    seconds: float = 1.0  # deadline of one batch
    layer_stride: int = 1  # look at every n-th routed layer
    max_destination_load: int | None = None  # assignments of one EP rank in one layer of one column
    overlap: bool = True  # plan the next step while this one trains, the next file too; local has no next
    cost_model: str | None = None  # recipe=plan: file of benchmarks.fit_cost_model, predicts seconds
    write_permutation: str | None = None  # recipe=plan: file for a longest-first placement of experts


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """How the policy computes."""

    attention: Attention = Attention.auto  # backend, auto = the first that honours what is asked
    linear_attention: LinearAttention = LinearAttention.auto  # backend of KDA and its short convolution
    replay: bool | None = None  # null = true for a model with experts
    recompute: Recompute = Recompute.none  # activations computed again in backward
    compile: bool = False  # torch.compile of every block, in regions between its mixers and experts
    logprobs: LogprobKind = LogprobKind.chunked  # logits a chunk at a time, all at once, or a fused kernel
    logprob_chunk: int = 512  # scored tokens whose logits are held at a time
    dtype: Dtype = Dtype.float32  # compute dtype; weights and reductions stay float32
    expert_dtype: Dtype | None = None  # of routed experts; null = bfloat16 under compile, else policy.dtype


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """The objective. Every sum is divided once, by a global count."""

    kind: LossKind = LossKind.grpo  # policy objective
    reduction: Reduction = Reduction.token  # mean over response tokens, or over per-response means
    clip_low: float = 0.2  # ratio clipped below 1 - clip_low
    clip_high: float = 0.28  # ratio clipped above 1 + clip_high
    dual_clip: float | None = None  # ratio bound where the advantage is negative, > 1, null = none
    constant_length: int | None = None  # tokens that replace each response's own length in reduction=response
    tis_low: float | None = None  # importance weight behaviour -> anchor, lower clip
    tis_high: float | None = None  # upper clip of the same weight
    tis_level: WeightLevel = WeightLevel.token  # one weight a token, or the product over the response
    tis_bound: WeightBound = WeightBound.truncate  # outside the clips: clip the weight, or set it to 0
    max_sequence_kl: float | None = None  # behaviour -> policy, per token; worse responses are left out
    entropy_coef: float = 0.0  # weight of the entropy bonus
    kl: KlEstimator = KlEstimator.k3  # estimator of the KL divergence from the reference
    kl_coef: float = 0.0  # weight of that divergence
    reference: str | None = None  # frozen weights, read like init_from; null = those the run starts from
    normalize_advantages: bool = True  # divide by the group's standard deviation
    on_nonfinite: OnNonfinite = OnNonfinite.abort  # a loss or gradient that is not finite
    router_aux_weight: float = 0.0  # weight of the router balancing loss
    router_z_weight: float = 0.0  # weight of the router z-loss
    router_aux_grouping: AuxGrouping = AuxGrouping.pack  # tokens one balancing penalty looks at
    router_aux_reduction: Reduction = Reduction.token  # how balancing penalties are averaged
    router_z_reduction: Reduction = Reduction.token  # how z penalties are averaged
    router_count_source: CountSource = CountSource.dispatch  # counted ids: used, or live top-k


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW with linear warm-up and a constant rate."""

    lr: float = 2e-4  # learning rate after warm-up
    warmup_steps: int = 10  # updates of linear warm-up
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.98  # decay of the second moment
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0  # decoupled
    max_grad_norm: float | None = 1.0  # null = no clipping


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    """How ranks share the model."""

    kind: StrategyKind = StrategyKind.single  # one process, or FSDP2 with expert parallelism
    ep_degree: int = 1  # consecutive ranks that hold all experts once
    timeout_seconds: int = 600  # of one collective


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """What the Lightning trainer is given."""

    accelerator: str = "cpu"  # cpu or gpu
    devices: int = 1  # processes of one node
    num_nodes: int = 1  # world size = devices x num_nodes
    max_steps: int = 100  # optimizer steps

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """Supervised updates before the recipe; not part of trainer.max_steps."""

    steps: int = 0  # supervised updates in a fresh run, never on resume; 0 = none
    lr: float = 2e-3  # learning rate of the warm start
    samples_per_step: int = 128  # documents of one supervised update


@dataclass(kw_only=True, slots=True)
class UpcycleConfig:
    """A dense Llama model whose feed-forwards become experts, before the recipe; made once, then cached."""

    dense: str | None = None  # Hugging Face directory, .gguf file, or package:NAME that carries one
    noise: float = 0.01  # perturbation of an expert's weights, RMS over their RMS; 0 = equal experts


@dataclass(kw_only=True, slots=True)
class SftConfig:
    """Chat data of recipe=sft; without a path it trains on the task's demonstrations."""

    path: str | None = None  # file or directory of conversations, for datasets also a name; null = the task's
    format: SftFormat = SftFormat.auto  # what path and eval_path are
    subset: str | None = None  # datasets: name of the configuration
    split: str = "train"  # datasets: rows to train on
    epochs: int | None = None  # passes over the data, null = as many as trainer.max_steps takes
    shuffle_buffer: int = 1024  # consecutive rows that are shuffled together, 1 = the order of the file
    overlong: Overlong = Overlong.refuse  # conversations of more than model.max_seq_len tokens
    eval_path: str | None = None  # held-out conversations, read like path
    eval_split: str = "validation"  # datasets: rows of eval_path
    eval_samples: int | None = None  # conversations of eval_path, from its beginning, null = all
    eval_interval: int = 50  # updates between evaluations, 0 = only before the first and after the last


@dataclass(kw_only=True, slots=True)
class ImportsConfig:
    """How recipe=import reads rollouts of another system; expert counts come from the model."""

    reward_key: str | None = None  # entry of rewards that are mappings
    default_reward: float | None = None  # of samples that carry none, null = refused
    group_size: int | None = None  # this many consecutive samples are a group, null = as recorded
    leave_out_bad_routes: bool = False  # samples whose routes cannot be replayed, instead of a refusal


@dataclass(kw_only=True, slots=True)
class ScoringConfig:
    """When the anchor log-probs come from a pass of their own."""

    mode: ScoringMode = ScoringMode.auto  # auto skips the pass where that is exact and checked
    check_interval: int = 50  # updates, 0 = only the first of each process
    tolerance: float = 1e-3  # mean absolute difference over active tokens
    max_behavior_gap: float | None = None  # mean absolute policy - behaviour, null = off


@dataclass(kw_only=True, slots=True)
class CallbacksConfig:
    """What happens around updates."""

    checkpoint_interval: int | None = None  # updates between checkpoints, null = only at the end
    keep_checkpoints: int = 2  # newest ones that stay
    progress: bool = True  # bar over packs and updates
    pictures: bool = True  # reward.png and packs.png at the end


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    """Where metrics go beside the terminal; metrics.csv is always written."""

    kind: LoggerKind = LoggerKind.csv  # metrics.csv alone, or Weights & Biases too
    project: str = "olmo_rl"  # wandb project
    offline: bool = True  # wandb without an account


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """Topology for recipe=plan when it is not this machine's."""

    world_size: int | None = None  # null = trainer.devices x trainer.num_nodes
    ep_degree: int | None = None  # null = strategy.ep_degree
