"""When a schedule is worth a thought, beyond what a table of lengths says; by hand, optional."""

from __future__ import annotations

__all__ = ["ADVICE"]

ADVICE: dict[str, str] = {
    "serial": "Never for speed. It fits wherever anything fits, so a solve always has something.",
    "gpipe": "Few micro-batches, or a framework with nothing else: it is as long as 1F1B, and "
    "holds all micro-batches instead of p.",
    "1f1b": "The baseline: where the backward cannot be split, a device holds one stage, and p "
    "activations fit.",
    "1f1b-r": "Memory far below p activations and a host too slow for copies; it costs a forward "
    "per micro-batch and device.",
    "interleaved": "Where the backward cannot be split, messages are cheap (v times as many), and "
    "there is memory beyond 1F1B's.",
    "zb-h1": "One stage per device, a split backward, memory for p activations, and an optimizer "
    "step that waits for all devices: then it is hard to beat, and often proven optimal.",
    "zb-h2": "As ZB-H1 with memory for 2p - 1 activations, where devices step their optimizers "
    "without waiting for each other. Where they wait, ZB-H1 is nearly as short in half of the "
    "memory.",
    "zb-1p": "ZB-H1's memory where stages or messages are unequal.",
    "zb-2p": "ZB-H2's memory where stages or messages are unequal.",
    "zb-greedy": "Memory anywhere from p activations up. Below p it gets slow quickly; V-Half, "
    "V-Min or offload are better there.",
    "gis": "A loop of chunks with 1F1B's memory and a split backward; the base of PO-F.",
    "gis-h": "A loop of chunks with about three quarters of 1F1B's memory (two chunks); the base "
    "of PO-H.",
    "zb-v": "Two chunks per device and 1F1B's memory, F, I and W nearly equal: no bubble of the "
    "span, and half of ZB-H1's bubble of the makespan.",
    "v-half": "Half of 1F1B's memory without touching the host, F, I and W nearly equal.",
    "v-min": "A third of 1F1B's memory without touching the host; needs nearly equal times, as "
    "the block has no slack.",
    "po-h": "A loop of chunks, copies that take at most about half of F + I + W, memory towards "
    "a quarter of 1F1B's on many devices.",
    "po-f": "The same with all chunks on the host: the least memory of the offloading rules.",
    "ada-offload": "Some offload on any placement, with the order of a tight schedule; a good "
    "start for the search.",
    "greedy": "Any placement, any limit, unequal stages: where the handcrafted rules do not apply.",
    "building-blocks": "Limits between those of ZB-V, V-Half and V-Min, and unequal times.",
}
"""One or two sentences per family; a family that is not here has its table only."""
