"""A plan as a person reads it: what it is, each rank's memory, where the step's time goes, hours, dollars. No torch."""

from __future__ import annotations

from conf.names import changed, named
from conf.schema import HardwareConfig, RootConfig
from conf.words import count, large, plural, significant

MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "messages", "workspace", "allocator", "runtime")
SPENT = {  # part of the step -> what a reader calls it
    "forward": "forward",
    "backward_input": "backward, input",
    "backward_weight": "backward, weights",
    "recompute": "recomputation",
    "host": "host (launching)",
    "tensor_parallel": "tensor-parallel messages",
    "data_gather": "sharded weights and gradients",
    "bubble_schedule": "bubble: schedule",
    "bubble_imbalance": "bubble: uneven stages",
    "stage_transfers": "stage transfers, exposed",
    "data_parallel": "data-parallel messages, exposed",
    "tied_weight": "tied weight's two gradients",
    "optimizer": "optimizer",
}


def gib(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:,.0f} MiB"


def duration(seconds: float) -> str:
    """A time for people, in three digits: of the largest unit of which it is more than one or two."""
    size = abs(seconds)
    for least, unit, name in ((48 * 3600, 86400, "days"), (2 * 3600, 3600, "hours"), (1000, 60, "minutes")):
        if size >= least:
            return f"{significant(seconds / unit)} {name}"
    return f"{significant(seconds)} s" if float(f"{size:.3g}") >= 1 else f"{significant(seconds * 1e3)} ms"


def render(plan: dict, config: RootConfig) -> str:
    """The whole answer, a screenful."""
    blocks = [_heading(plan, config), _memory_table(plan), _time_table(plan), _totals(plan, config)]
    if plan["warnings"]:
        blocks.append("\n".join(f"warning    {warning}" for warning in plan["warnings"]))
    return "\n\n".join(blocks)


def _heading(plan: dict, config: RootConfig) -> str:
    model, parallel, train = config.model, config.parallel, config.train
    parts = [count(parallel.stages, "stage")]
    if parallel.interleave > 1:
        parts[0] += f" x {count(parallel.interleave, 'model stage')}"
    parts += [f"{key} {ranks}" for key, ranks in (("tensor", parallel.tensor), ("data", parallel.data)) if ranks > 1]
    extras = [name for name, used in (("sequence parallel", parallel.sequence_parallel),) if used]
    extras += [f"shard {parallel.shard}"] if parallel.shard != "none" else []
    extras += [f"checkpoint {parallel.checkpoint}"] if parallel.checkpoint != "never" else []
    node = config.hardware.devices_per_node
    noun = "process" if config.hardware.device == "cpu" else "device"
    where = count(plan["devices"], noun) + (" on this machine" if noun == "process" else f", {node} a node")
    replicas = f" on each of {count(parallel.data, 'replica')}" if parallel.data > 1 else ""
    micro = train.global_batch // (parallel.data * train.accumulate * parallel.chunks)
    flushes = f"{count(train.accumulate, 'flush')} x " if train.accumulate > 1 else ""
    return "\n".join(
        [
            f"model      {named('model', model)}: {plan['parameters']:,} parameters, "
            f"{count(model.blocks, 'block')} of width {model.hidden}, vocabulary {model.vocabulary:,}",
            f"parallel   {named('parallel', parallel)}: {' x '.join(parts)} = {where}; {parallel.schedule}"
            + "".join(f", {extra}" for extra in extras),
            f"batch      {count(train.global_batch, 'sequence')} of {count(train.sequence, 'token')} = "
            f"{count(plan['tokens_per_step'], 'token')} a step: {flushes}{count(parallel.chunks, 'micro-batch')} of "
            f"{micro}{replicas}",
            f"hardware   {named('hardware', config.hardware)}, {train.precision}; software {plan['stack']}",
        ]
    )


def _memory_table(plan: dict) -> str:
    """Ranks that hold the same are one row."""
    largest, capacity = max(held["total"] for held in plan["ranks"]), plan["capacity_bytes"]
    unit, unit_name = (2**30, "GiB") if largest >= 2**31 else (2**20, "MiB")
    rows: list[list[str]] = []
    spans: list[list[int]] = []
    for rank, held in enumerate(plan["ranks"]):
        cells = [_layers(held["layers"]), *(_cell(held[name], unit) for name in (*MEMORY, "total"))]
        if rows and rows[-1][1:] == cells[1:] and len(plan["ranks"][rank - 1]["layers"]) == len(held["layers"]):
            spans[-1].append(rank)
            rows[-1][0] = f"{rows[-1][0].split(' … ')[0]} … {cells[0]}"
        else:
            rows.append(cells)
            spans.append([rank])
    labels = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    table = [["rank", f"memory in {unit_name}", *MEMORY, "total"]] + [
        [label, *row] for label, row in zip(labels, rows, strict=True)
    ]
    lines = [align(table, left=2)]
    needed = plan["needed_bytes"]
    if capacity:
        fullest = [held["total"] for held in plan["ranks"]].index(largest)
        together = f"all {plan['devices']} processes together" if plan["devices"] > 1 else "the process holds"
        who = together if plan["per_machine"] else f"fullest, rank {fullest},"
        lines.append(f"{who} {gib(needed)} of {gib(capacity)}: {_verdict(needed, capacity)}")
    if plan["remedies"]:
        lines += ["what fits, fewest devices and fastest first:"] + [f"  {remedy}" for remedy in plan["remedies"][:6]]
    elif capacity and needed > capacity:
        lines.append("no change of the layout was found that fits: take a smaller model, global batch or sequence")
    return "\n".join(lines)


def _verdict(needed: float, capacity: float) -> str:
    if needed <= capacity:
        return f"fits, {1 - needed / capacity:.0%} free"
    return f"DOES NOT FIT, {gib(needed - capacity)} too much"


def _cell(count: int, unit: int) -> str:
    return f"{count / unit:.{1 if count >= 10 * unit or unit < 2**30 else 2}f}" if count else "0"


def _layers(names: list[str]) -> str:
    blocks = [name.split(".")[1] for name in names if name.startswith("block.")]
    others = [name for name in names if not name.startswith("block.")]
    return " + ".join([count(len(blocks), "block"), *others]) if blocks else " + ".join(others)


def _time_table(plan: dict) -> str:
    total = sum(plan["step"].values())
    rows = [["a step", duration(total), ""]]
    for name, label in SPENT.items():
        seconds = plan["step"].get(name, 0.0)
        if seconds > 0.0005 * total or seconds < -0.0005 * total:
            rows.append([f"  {label}", duration(seconds), f"{seconds / total:.1%}"])
    return align(rows, left=1)


def _totals(plan: dict, config: RootConfig) -> str:
    figures, run, hardware = plan["predicted"], plan["run"], config.hardware
    speed = f"speed      {figures['tokens_per_s']:,.0f} tokens/s, bubble_fraction {figures['bubble_fraction']:.3f}"
    if "mfu" in figures:
        speed += f", mfu {figures['mfu']:.3f} (attention's whole square counted, recomputation not)"
    hours = run["hours"]
    length = f"{significant(hours)} hours = {hours / 24:,.1f} days" if hours > 48 else duration(3600 * hours)
    lines = [
        speed,
        f"run        {count(run['steps'], 'step')}, {large(run['tokens'])} {plural(run['tokens'], 'token')}: {length}",
    ]
    if "cost_usd" in figures:
        lines.append(
            f"cost       {dollars(figures['cost_usd'])} at ${hardware.price_usd_per_hour:,.2f} an hour for a node of "
            f"{hardware.devices_per_node}{_price_source(hardware)}"
        )
    elif hardware.device != "cpu":
        lines.append("cost       unknown: give hardware.price_usd_per_hour, or a cloud node such as hardware=p4de")
    return "\n".join(lines)


def dollars(amount: float) -> str:
    """For people: cents of what is little."""
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}" if amount >= 0.005 or not amount else "under $0.01"


def _price_source(hardware: HardwareConfig) -> str:
    """The day on which the file's price was read is not that of a price that was typed."""
    typed = {change.partition("=")[0] for change in changed("hardware", hardware)}
    if "price_usd_per_hour" in typed and "price_date" not in typed:
        return ", as typed"
    return f", on demand, {hardware.price_date}" if hardware.price_date else ""


def align(rows: list[list[str]], left: int) -> str:
    """Columns of equal width; the first `left` flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
