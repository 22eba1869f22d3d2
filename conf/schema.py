"""Every configuration dataclass: names, types, units. Values live in the yaml files beside this one. Imports no torch.

`null` in a yaml file means "chosen for you": conf/resolve.py fills it from the model and the hardware, and every
resolved value is printed and stored in the run folder. slots=True: `+typo=1` is then an error (OmegaConf.to_object).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Optional, get_type_hints

from omegaconf import MISSING


@dataclass(slots=True)
class ModelConfig:
    """One Transformer (or MLP) as an ordered list of layers: embedding, block.0 ... block.N-1, norm, head."""

    name: str = MISSING  # shown in tables; the yaml file's own name
    family: str = MISSING  # gpt | llama | mlp
    blocks: int = MISSING  # number of blocks between embedding and norm
    hidden: int = MISSING  # width of the residual stream, D
    heads: int = 1  # attention heads, H; hidden must be divisible by it (mlp ignores it)
    key_value_heads: Optional[int] = None  # llama: heads of keys and values, shared by the queries'; null = heads
    feedforward: Optional[int] = None  # inner width of a block's MLP; null = 4 x hidden; llama: see models/describe.py
    positions: int = MISSING  # longest sequence the model can take (rows of the position table), tokens
    vocabulary: Optional[int] = None  # rows of the embedding and the head; null = the tokenizer's
    vocabulary_multiple: int = 1  # the vocabulary is padded up to a multiple of this
    tied: bool = True  # the head uses the token embedding's weight
    dropout: float = 0.0  # probability, on residuals and embeddings
    initializer_std: float = 0.02  # standard deviation of the initial weights (GPT-2's)
    norm_eps: float = 1e-5  # llama: added to the mean square in RMSNorm
    rope_theta: float = 500_000.0  # llama: base of the rotary positions' frequencies (Llama 3's; Llama 1 and 2: 10,000)
    rope_scaling: float = 1.0  # llama: slow rotary frequencies are divided by this, as Llama 3.1 does by 8; 1 = none


@dataclass(slots=True)
class ParallelConfig:
    """How the list of layers is cut and run."""

    name: str = MISSING  # shown in tables; the yaml file's own name
    engine: str = "torch"  # single | torch | fairscale
    schedule: str = "1f1b"  # gpipe | 1f1b | ... (python -m pipeline.schedule lists them)
    stages: int = MISSING  # pipeline ranks, p
    chunks: Optional[int] = None  # micro-batches a flush, m; null = 4 x stages
    interleave: Optional[int] = None  # model stages a rank, v; null = the schedule's own
    tensor: int = 1  # ranks that share every layer of a stage, t
    data: int = 1  # replicas of the whole pipeline, each with its part of the batch, d
    sequence_parallel: bool = False  # tensor ranks also share norms and residuals, each a part of the sequence
    shard: str = "none"  # what data ranks hold only a part of: none | optimizer | gradients | full (weights too)
    # what the cut evens out over the ranks: auto (predicted time) | time (measured here) | flops | parameters | memory
    # | uniform (blocks); or a list: blocks (or layers) of each model stage
    balance: Any = "auto"
    memory_cap_bytes: Optional[float] = None  # most that a cut may put on a rank; null = no cap (planning/balance.py)
    checkpoint: str = "never"  # activation checkpointing: never | except_last | always | selective (plan.py)
    checkpoint_interval: int = 1  # blocks recomputed together when checkpointing


@dataclass(slots=True)
class OptimizerConfig:
    """The update rule, its learning-rate schedule and clipping."""

    name: str = MISSING  # adamw | sgd | adafactor | muon (blocks' matrices; adamw for all else)
    learning_rate: Optional[float] = None  # peak value; null = by conf/resolve.py (sgd needs a value)
    beta1: float = 0.9  # adamw, muon's adamw: decay of the first moment
    beta2: float = 0.95  # adamw, muon's adamw: decay of the second moment
    beta2_decay: float = 0.8  # adafactor: the second moment's decay at step t (from 1) is 1 - t^-beta2_decay
    update_rms: float = 1.0  # adafactor: largest root mean square of an update, before the rate
    eps: float = 1e-8  # adamw, muon's adamw: added to the root of the second moment; adafactor: least value of it
    momentum: float = 0.0  # sgd, muon
    weight_decay: float = 0.0  # of matrices but embeddings; decoupled, except for sgd
    schedule: str = "cosine"  # cosine | linear | constant | wsd (warm-up, stable, decay)
    warmup_steps: Optional[int] = None  # linear warm-up, steps; null = by hardware, at most a tenth of the run
    decay_fraction: float = 0.2  # wsd: the last part of the run in which the rate falls
    final_fraction: float = 0.1  # learning rate at the end / peak
    clip_norm: Optional[float] = 1.0  # largest global gradient norm; null = no clipping


@dataclass(slots=True)
class HardwareConfig:
    """One kind of device and node. Rates a second, sizes in bytes; `sources` says where each figure is from."""

    name: str = MISSING
    device: str = MISSING  # auto | cpu | cuda
    devices_per_node: Optional[int] = None  # accelerators of a node; cpu: null = its cores
    precision: Optional[str] = None  # default training precision: float32 | bfloat16
    peak_flops_float32: Optional[float] = None  # FLOP/s of one device (cpu: of one core)
    peak_flops_bfloat16: Optional[float] = None  # dense matrix FLOP/s of one device
    memory_bytes: Optional[float] = None  # of one device; cpu: null = what the machine has
    memory_bytes_per_s: Optional[float] = None  # memory bandwidth of one device
    link_bytes_per_s: Optional[float] = None  # inside a node, one direction, a device
    network_bytes_per_s: Optional[float] = None  # between nodes, one direction, a device
    # what programs reach of it: plan.py's (planning/rates.py, planning/links.py)
    matmul_efficiency: Optional[float] = None  # part of the peak that a large matrix product reaches
    matmul_half_size: Optional[float] = None  # a dimension of this size halves the efficiency: n / (n + this)
    memory_efficiency: Optional[float] = None  # part of the bandwidth that element-wise kernels reach
    kernel_latency_s: Optional[float] = None  # start of one kernel
    exponentials_per_s: Optional[float] = None  # exp, tanh, erf (cpu: of one core); null = hidden behind memory traffic
    thread_efficiency: Optional[float] = None  # cpu: speed of a rank's n cores / n times that of one; null = 1
    link_efficiency: Optional[float] = None  # part of link_bytes_per_s that a collective reaches
    link_latency_s: Optional[float] = None  # of one message inside a node
    network_efficiency: Optional[float] = None  # part of network_bytes_per_s that a collective reaches
    network_latency_s: Optional[float] = None  # of one message between nodes
    rank_slowdown: Optional[float] = None  # cpu: of computing in ranks that exchange messages, beside alone; null = 0
    # of the host, which accelerators hide behind their kernels: seconds for each micro-batch
    action_overhead_s: Optional[float] = None  # of each F and each B or I in a pipeline; null = planning/stack.py's
    tensor_block_s: Optional[float] = None  # forward and backward of a block that tensor ranks share; null = 0
    sharded_block_s: Optional[float] = None  # the same of one that is fully sharded; null = 0
    replicated_block_s: Optional[float] = None  # the same of one that data ranks share otherwise; null = 0
    reduced_block_s: Optional[float] = None  # once a step: its gradients are added up; null = 0
    # cpu, calibrated: of a kind of layer [[FLOPs of its forward, measured / planned seconds], …]; between them by log
    corrections: dict[str, Any] = field(default_factory=dict)
    price_usd_per_hour: Optional[float] = None  # on demand, one node
    price_date: Optional[str] = None  # the day the price was read
    # the recipe that a run on this hardware starts from, where train.* and optimizer.* leave it open
    warmup_steps: Optional[int] = None
    max_minutes: Optional[float] = None
    checkpoint_every: Optional[int] = None
    sources: dict[str, str] = field(default_factory=dict)  # figure -> where it is from


@dataclass(slots=True)
class DataConfig:
    """Where tokens come from and how they are split."""

    name: str = MISSING
    source: str = MISSING  # python_source | text | jsonl | parquet | datasets | tokens | synthetic | mix
    path: Optional[str] = None  # a file, a folder or a glob; tokens: a .bin file; datasets: a folder or a hub's name
    sources: list[Any] = field(default_factory=list)  # mix: [{source: …, path: …, weight: …}, …], keys of this class
    field: str = "text"  # jsonl, parquet, datasets: the field (column) that holds a document's text
    # a line that is no JSON, or a document without text: stop (an error that says where) | skip (and count them)
    bad_documents: str = "stop"
    subset: Optional[str] = None  # datasets: the configuration's name
    split: str = "train"  # datasets: the part that is read (what is held out comes from it too)
    allow_download: bool = False  # datasets: may fetch what is not on this machine
    tokenizer: str = "byte"  # byte | bpe (trained on these data) | the path of a tokenizer.json
    tokenizer_vocabulary: int = 4096  # bpe: number of tokens, with 256 bytes and the end-of-document token
    # tokens: its id; a tokenizer.json: its text. null = the file's own word, or the usual ones (<|endoftext|>, </s>, …)
    separator: Any = None  # the token between two documents
    cross_documents: bool = True  # attention may look from one document into the one before it in the sequence
    dtype: Optional[str] = None  # tokens: uint8 | uint16 | uint32; null = what the file's sidecar says
    vocabulary: Optional[int] = None  # tokens: number of different ids; null = what the file's sidecar says
    validation_fraction: float = 0.05  # of the tokens, held out; never met in training; 1: all, with evaluate=
    cache: str = ".cache/tokens"  # tokenised once into a memory map here, keyed by content
    synthetic_tokens: int = 2_000_000  # synthetic: length of the stream
    synthetic_vocabulary: int = 64  # synthetic: number of symbols
    synthetic_seed: int = 0  # synthetic: of the stream itself (train.seed shuffles it)


@dataclass(slots=True)
class TrainConfig:
    """The run itself."""

    steps: Optional[int] = None  # optimizer steps; null = from tokens, or by hardware
    tokens: Optional[float] = None  # length of the run in tokens, in place of steps; both given: an error
    global_batch: Optional[int] = None  # sequences an optimizer step; null = by hardware
    sequence: Optional[int] = None  # tokens a sequence, T; null = by hardware, at most model.positions
    accumulate: int = 1  # flushes an optimizer step
    seed: int = 0  # of weights, data order and dropout
    precision: Optional[str] = None  # float32 | bfloat16 | float64; null = by hardware
    max_minutes: Optional[float] = None  # the run stops cleanly after this long; null = by hardware; 0 = no limit
    validate_every: Optional[int] = None  # steps; null = four times a run; 0 = never
    validate_sequences: Optional[int] = None  # held-out sequences of one validation; null = by hardware
    log_every: Optional[int] = None  # steps between printed lines; null = about 20 lines a run
    # steps kept in timeline.json: so many after warm-up, or a list of steps (from 1); 0 = none, and none is explained
    trace: Any = 3
    checkpoint_every: Optional[int] = None  # steps; null = by hardware (cpu: at the end and at a stop only); 0 = never
    keep_checkpoints: int = 2  # the newest complete ones; older ones are deleted
    max_restarts: int = 0  # times that all ranks start again from the newest checkpoint after one has died
    # a rank that waits longer than this for another ends the run, seconds; emulated: longer than this and the plan says
    stall_timeout_s: float = 600.0
    nonfinite: str = "stop"  # a loss or gradient that is not finite: stop | skip (skips the step and counts it)


@dataclass(slots=True)
class FaultConfig:
    """A fault on purpose, once a run: to see what restarts, resuming and the watchdog do."""

    kind: str = "none"  # none | exception | kill (SIGKILL) | stall (never answers again) | slow
    rank: int = 0
    step: int = 1  # from 1: the rank does it as this step begins
    seconds: float = 1.0  # slow: how much longer each step from then on takes on that rank


@dataclass(slots=True)
class EmulateConfig:
    """Hardware that is not there: each layer's work is a wait of the planned length, in one process a pipeline rank."""

    enabled: bool = False  # hardware=emulated_a100_80gb and the like switch it on
    time_scale: float = 1.0  # seconds that a second of the emulated hardware takes here; figures are in its seconds
    jitter: float = 0.0  # standard deviation of each action's duration, part of it; drawn by train.seed
    # what is planted, to see it found; times in seconds of the emulated hardware
    slow_rank: Optional[int] = None  # this pipeline rank's actions take slow_factor times as long
    slow_factor: float = 2.0
    slow_link: Optional[int] = None  # messages from this rank to the next and back take slow_link_factor as long
    slow_link_factor: float = 10.0
    slow_host: Optional[int] = None  # this pipeline rank's host takes slow_host_s before each action
    slow_host_s: float = 0.01


@dataclass(slots=True)
class RootConfig:
    """The whole of train.py's configuration."""

    name: str = "runs"  # the experiment: runs land in experiments/NAME/RUN
    model: ModelConfig = MISSING
    parallel: ParallelConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    hardware: HardwareConfig = MISSING
    data: DataConfig = MISSING
    train: TrainConfig = field(default_factory=TrainConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    emulate: EmulateConfig = field(default_factory=EmulateConfig)
    # a run folder to go on from, with what is typed on top; auto = the newest under `name`, or a fresh start
    resume: Optional[str] = None
    evaluate: Optional[str] = None  # a run folder: no training; its newest checkpoint's loss on all held-out tokens
    preflight: bool = True  # refuse to start when the machine's memory cannot hold the run
    profile: Any = False  # true: measure each kind of layer anew and print it before the run; a path: take that profile
    resume_sweep: bool = False  # -m: run only the jobs that have no completed run with the same overrides


@dataclass(slots=True)
class VerifyConfig:
    """What verify.py compares."""

    width: Optional[int] = None  # model.hidden in place of the model's own, feed-forward in proportion; null = whole
    blocks: Optional[int] = None  # model.blocks in place of the model's own; null = whole
    tolerance: float = 1e-10  # largest relative error that passes; everything is float64
    all: bool = False  # every schedule, cut, chunking, checkpointing and engine, on a small model, in one launch
    rows: int = 10  # parameters shown, worst first


@dataclass(slots=True)
class VerifyRootConfig(RootConfig):
    """The whole of verify.py's configuration: train.py's, and what to compare."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)


@dataclass(slots=True)
class PlanRootConfig(RootConfig):
    """The whole of plan.py's configuration: train.py's, and what to plan."""

    stack: str = "torch"  # software whose habits are predicted: torch = this project; planning/stack.py lists them
    points: Optional[str] = None  # a table of layouts, one a row, to predict in place of one plan (planning/points.py)
    output: Optional[str] = None  # the file to write; null = experiments/plans/…json, or beside the table


def register() -> None:
    """Put the schemas where the defaults lists look for them: in Hydra's ConfigStore. May be repeated."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=RootConfig)
    ConfigStore.instance().store(name="plan_schema", node=PlanRootConfig)
    ConfigStore.instance().store(name="verify_schema", node=VerifyRootConfig)


def to_dict(config: RootConfig) -> dict:
    """The configuration as plain dicts, lists and values that json.dumps takes."""
    return asdict(config)


def from_dict(values: dict, cls: type = RootConfig) -> Any:
    """The dataclass that `to_dict` was given. Raises ValueError for a key that the schema does not have."""
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{cls.__name__} has no key {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    types = get_type_hints(cls)
    return cls(**{k: from_dict(v, types[k]) if is_dataclass(types[k]) else v for k, v in values.items()})
