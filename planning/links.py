"""Messages between ranks: which link they cross, and how long a collective takes by size and ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import HardwareConfig, ParallelConfig
from planning.rates import figure


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other: `local` of them in each of `nodes` nodes."""

    local: int = 1
    nodes: int = 1
    link_bytes_per_s: float = 1.0  # inside a node: one direction, a rank, reached
    link_latency_s: float = 0.0  # of one message
    network_bytes_per_s: float = 1.0  # between nodes: one direction, a rank, reached
    network_latency_s: float = 0.0

    def all_reduce_s(self, message: float) -> float:
        """Reduce-scatter, then all-gather (Thakur et al. 2005; Patarasuk and Yuan 2009)."""
        return 2 * self.gather_s(message)

    def gather_s(self, message: float) -> float:
        """All-gather or reduce-scatter of `message` bytes in all. A ring of n ranks sends n - 1 messages of 1/n each;
        over several nodes one ring inside each node, then for each local rank one over the nodes with its share
        (hierarchical: Jia et al. 2018, arXiv 1807.11205)."""
        if not message:
            return 0.0
        inside = (self.local - 1) * (message / self.local / self.link_bytes_per_s + self.link_latency_s)
        part = message / self.local / self.nodes
        return inside + (self.nodes - 1) * (part / self.network_bytes_per_s + self.network_latency_s)

    @property
    def bytes_per_s(self) -> float:
        """Of one message to the farthest neighbour, which sets the pace of a pipeline."""
        return self.network_bytes_per_s if self.nodes > 1 else self.link_bytes_per_s

    @property
    def latency_s(self) -> float:
        return self.network_latency_s if self.nodes > 1 else self.link_latency_s


@dataclass(frozen=True)
class Links:
    """The groups of one rank. Ranks are numbered tensor first, then data, then stage: the busiest stay in a node."""

    tensor: Group
    data: Group
    stage: Group  # to the next stage
    ends: Group  # first and last stage: the two copies of a tied weight


def links(hardware: HardwareConfig, parallel: ParallelConfig) -> Links:
    """ValueError where the layout needs a link of which the hardware file has no figure."""
    t, d, p = parallel.tensor, parallel.data, parallel.stages if parallel.engine == "torch" else 1
    return Links(
        tensor=_group(hardware, t, 1, f"parallel.tensor={t}"),
        data=_group(hardware, d, t, f"parallel.data={d}"),
        stage=_group(hardware, p, t * d, f"parallel.stages={p}"),
        ends=_group(hardware, min(p, 2), _between_ends(hardware, p, t * d), f"parallel.stages={p}"),
    )


def _between_ends(hardware: HardwareConfig, stages: int, stage: int) -> int:
    """How far apart the first and the last stage, of `stage` ranks each, are to be taken: neighbours in one node, or
    their distance, of which no node that is smaller than all stages holds both."""
    node = hardware.devices_per_node
    return 1 if node and stages * stage <= node else stage * (stages - 1)


def _group(hardware: HardwareConfig, ranks: int, stride: int, needed_by: str) -> Group:
    """`ranks` ranks, `stride` apart."""
    if ranks == 1:
        return Group()
    node = ranks * stride
    if hardware.device != "cpu":
        node = int(figure(hardware, "devices_per_node", needed_by))
    local = max(1, min(ranks, node // stride))
    nodes = -(-ranks // local)
    values = {}
    for kind, used in (("link", local > 1), ("network", nodes > 1)):
        if used:
            reached = figure(hardware, f"{kind}_efficiency", needed_by)
            values[f"{kind}_bytes_per_s"] = figure(hardware, f"{kind}_bytes_per_s", needed_by) * reached
            values[f"{kind}_latency_s"] = figure(hardware, f"{kind}_latency_s", needed_by)
    return Group(local, nodes, **values)
