"""The typed configuration: everything a run is made of, and what follows from it.

Its sections stand in sections.py, the words they choose from in choices.py; both are named from here.
`register()` hands the schema to Hydra; the command line and tests call it, never an import. The comment
behind a field is its documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from olmo_rl.choices import (
    Attention,
    AuxGrouping,
    BalanceKind,
    BalanceLevel,
    BlockNorms,
    CountSource,
    Dtype,
    Filter,
    ImportSource,
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
    Recipe,
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
from olmo_rl.sections import (
    BalanceConfig,
    BatchConfig,
    CallbacksConfig,
    ExportConfig,
    ImportsConfig,
    LoggerConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PackingConfig,
    PlanConfig,
    PolicyConfig,
    RolloutsConfig,
    ScoringConfig,
    ServeConfig,
    SftConfig,
    StrategyConfig,
    TaskConfig,
    TrainerConfig,
    UpcycleConfig,
    WarmStartConfig,
)
from olmo_rl.types import Padding

__all__ = [
    "Attention",
    "AuxGrouping",
    "BalanceConfig",
    "BalanceKind",
    "BalanceLevel",
    "BatchConfig",
    "BlockNorms",
    "CallbacksConfig",
    "Config",
    "CountSource",
    "Dtype",
    "ExportConfig",
    "Filter",
    "ImportSource",
    "ImportsConfig",
    "KlEstimator",
    "LayerType",
    "LinearAttention",
    "LoggerConfig",
    "LoggerKind",
    "LogprobKind",
    "LossConfig",
    "LossKind",
    "ModelConfig",
    "OnNonfinite",
    "OnVerifierFailure",
    "OptimConfig",
    "Overlong",
    "PackingConfig",
    "PackingKind",
    "PlanConfig",
    "PolicyConfig",
    "PublicationKind",
    "QkNorm",
    "Recipe",
    "Recompute",
    "Reduction",
    "RolloutsConfig",
    "ScoreFunction",
    "ScoringConfig",
    "ScoringMode",
    "ServeConfig",
    "SftConfig",
    "SftFormat",
    "Source",
    "StrategyConfig",
    "StrategyKind",
    "TaskConfig",
    "TaskKind",
    "TrainerConfig",
    "UpcycleConfig",
    "WarmStartConfig",
    "WeightBound",
    "WeightLevel",
    "register",
]


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything a run is made of."""

    recipe: Recipe = Recipe.train  # the verb, see recipes/
    run_name: str = "olmo_rl"  # the run directory is outputs/${run_name}
    seed: int = 0  # of all randomness
    ckpt_path: str | None = None  # last, a checkpoint directory, or null
    overwrite: bool = False  # train into a directory that holds a run
    cache_dir: str = "outputs/.cache"  # warm starts and upcycled weights, shared by runs
    source: ImportSource | None = None  # recipe=import: the system that recorded path
    path: str | None = None  # recipe=import: a file of that system, or a directory of them
    init_from: str | None = None  # weights to start from: checkpoint, safetensors file, Hugging Face model
    run_dir: str = ""  # filled by train.py with Hydra's runtime output directory
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    upcycle: UpcycleConfig = field(default_factory=UpcycleConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    imports: ImportsConfig = field(default_factory=ImportsConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def budget(self) -> int:
        """Tokens of one pack."""
        return self.packing.max_tokens if self.packing.max_tokens is not None else self.model.max_seq_len

    @property
    def replay(self) -> bool:
        """Whether recorded routes are replayed: null means in models with experts."""
        return bool(self.model.routed_layers) if self.policy.replay is None else self.policy.replay

    @property
    def expert_dtype(self) -> Dtype:
        """What routed experts compute in: compiled grouped products exist for bfloat16 alone."""
        default = Dtype.bfloat16 if self.policy.compile else self.policy.dtype
        return default if self.policy.expert_dtype is None else self.policy.expert_dtype

    @property
    def packed(self) -> bool:
        """Whether several samples share a row."""
        return self.packing.kind is PackingKind.consecutive

    @property
    def padding(self) -> Padding:
        """How rows are padded."""
        packing = self.packing
        multiple = self.budget if packing.pad_to_budget else packing.pad_to_multiple_of
        return Padding(multiple_of=multiple, pad_id=packing.pad_id, experts=self.model.expert_layout)

    @property
    def generates(self) -> bool:
        """Whether collections are generated during the run; such a source can fill a short collection."""
        return self.rollouts.source is not Source.files

    def scores_separately(self, *, steps_in_collection: int) -> bool:
        """Whether an update needs a scoring pass of its own: asked for, with a reference, or because after
        the first step of a collection the policy has moved away from its anchor.
        """
        return self.scoring.mode is ScoringMode.always or self.loss.kl_coef > 0 or steps_in_collection > 1

    @property
    def world_size(self) -> int:
        """Ranks of the run; of the planned topology for recipe=plan."""
        planned = self.plan.world_size if self.recipe is Recipe.plan else None
        return self.trainer.world_size if planned is None else planned

    @property
    def ep_degree(self) -> int:
        """Expert-parallel degree of the run; of the planned topology for recipe=plan."""
        planned = self.plan.ep_degree if self.recipe is Recipe.plan else None
        return self.strategy.ep_degree if planned is None else planned


def register() -> None:
    """Store the schema as `schema`, the first entry of the defaults list in conf/train.yaml."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)
