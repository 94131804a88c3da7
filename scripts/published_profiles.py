"""Writes examples/profiles/varuna-*.json: the models of Varuna's section 7 as stated profiles.

Bytes follow from the shapes of layers, times from the published mini-batches. Run it as
``python scripts/published_profiles.py``; a test compares its output with the files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from spottrain.codec import encode
from spottrain.morphing.plan.profiles import WITHIN_AS_BETWEEN
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.morphing.plan.workload import Workload
from spottrain.wire.model import (
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Profile,
    SectionFacts,
    SectionProfile,
    TiedParameter,
)
from spottrain_lab.planners.gpt import gpt_shape

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "profiles"
VOCABULARY = 50304
LENGTH = 1024
PARAMETER_BYTES, OPTIMIZER_BYTES = 4, 8
"""Float32 parameters, two moments of Adam."""
WIRE_BYTES = 2
"""Of an element of an activation, float16."""
BUS_BYTES_PER_S = 15.75e9
LAYER_WORKS = 4
"""Forward, recompute, and a backward of twice the forward, in forwards."""
EMBEDDING_SHARE = 0.05
"""Assumed time of the embedding over that of a layer."""


NETWORK = LinkProfile(latency_s=0.0005, bandwidth_bytes_per_s=1.25e9)
NVLINK = LinkProfile(latency_s=1e-5, bandwidth_bytes_per_s=150e9)
"""Of a V100: six links of 25 GB/s in each direction (NVIDIA V100 datasheet); latency assumed."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model and one measured mini-batch of it."""

    name: str
    layers: int
    hidden: int
    heads: int
    depth: int
    width: int
    microbatch_size: int
    minibatch_size: int
    step_s: float
    end_s: float
    """Of ``step_s`` what follows the last backward: assumed."""
    ends_apart: bool
    """Whether embedding and head are sections of their own."""
    shape_source: str
    step_source: str
    within_vm: LinkProfile = NETWORK

    @property
    def shape(self) -> TransformerShape:
        """Of the whole model."""
        return gpt_shape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            context=LENGTH,
            vocabulary=VOCABULARY,
            keeps_scores=True,
        )

    @property
    def activation_bytes(self) -> int:
        """Between stages, of one micro-batch."""
        return WIRE_BYTES * self.microbatch_size * LENGTH * self.hidden

    @property
    def copies_s(self) -> float:
        """Over the bus in a stage: activation and gradient, in and out."""
        return 4 * self.activation_bytes / BUS_BYTES_PER_S

    @property
    def forward_s(self) -> float:
        """Of a layer, from the published step."""
        count = self.minibatch_size / self.width / self.microbatch_size
        micro_s = (self.step_s - self.end_s) / (count + self.depth - 1)
        layers = max(1, round(self.layers / self.depth))
        return float(f"{(micro_s - self.copies_s) / layers / LAYER_WORKS:.3g}")

    @property
    def head_layers(self) -> float:
        """Operations of the head over those of a layer: dissertation eq. 4.2."""
        return self.shape.head_flops / self.shape.layer_flops


MODELS = (
    Published(
        name="2.5b",
        layers=54,
        hidden=1920,
        heads=20,
        depth=9,
        width=7,
        microbatch_size=2,
        minibatch_size=8192,
        step_s=70.1,
        end_s=1.0,
        ends_apart=False,
        shape_source="54 layers, hidden size 1920: Varuna section 3; 20 heads: "
        "Megatron-LM (2019), table 2. Micro-batch 2: assumed.",
        step_source="table 7: 9x7 takes 70.1 s",
    ),
    Published(
        name="8.3b",
        layers=72,
        hidden=3072,
        heads=32,
        depth=18,
        width=4,
        microbatch_size=2,
        minibatch_size=8192,
        step_s=203.1,
        end_s=3.0,
        ends_apart=False,
        shape_source="18x4 has 4 layers in a stage, hence 72: Varuna section 7.1.2; "
        "hidden size 3072, 32 heads: Megatron-LM (2019), table 2. Micro-batch 2: "
        "assumed.",
        step_source="table 7: 18x4 takes 203.1 s",
    ),
    Published(
        name="20b",
        layers=96,
        hidden=4160,
        heads=40,
        depth=49,
        width=6,
        microbatch_size=1,
        minibatch_size=8192,
        step_s=139.3,
        end_s=3.0,
        ends_apart=True,
        shape_source="96 layers: Varuna section 7.1.1. Hidden size 4160 with 40 heads: "
        "assumed, 12 h^2 parameters a layer then make 19.9 billion. Micro-batch 1: "
        "assumed.",
        step_source="table 4: 0.2 examples/s on each of 294 GPUs (49x6), hence 139.3 s",
    ),
    Published(
        name="200b",
        layers=100,
        hidden=12960,
        heads=96,
        depth=102,
        width=1,
        microbatch_size=1,
        minibatch_size=512,
        step_s=228.2,
        end_s=4.0,
        ends_apart=True,
        shape_source="100 layers, hidden size 12960, micro-batch 1, mini-batch 512, 102 "
        "stages: Varuna section 7.1.1. 96 heads: assumed, as GPT-3 has.",
        step_source="section 7.1.1: 0.022 examples/s on each of 102 GPUs (102x1), hence "
        "228.2 s, the update on the CPU included",
    ),
)

ON_NVLINK = replace(MODELS[2], name="20b-nvlink", within_vm=NVLINK)
"""What no table of Varuna's is about: the same GPUs, eight to a VM."""


def workload_of(model: Published) -> Workload:
    """Return the model, its profile and its machines."""
    parts = _sections(model)
    sections = [_facts(model, k, part, len(parts)) for k, part in enumerate(parts)]
    measured = [_profile(model, k, part, len(parts)) for k, part in enumerate(parts)]
    tied = TiedParameter(
        name="wte.weight",
        sections=(0, len(parts) - 1),
        param_bytes=PARAMETER_BYTES * VOCABULARY * model.hidden,
    )
    counted = sum(section.param_bytes for section in sections)
    fingerprint = f"varuna-{model.name}"
    return Workload(
        sources=_sources(model),
        facts=ModelFacts(
            fingerprint=fingerprint,
            num_parameters=(counted - tied.param_bytes) // PARAMETER_BYTES,
            blocks="CutPoint" if model.ends_apart else "transformer.h",
            sections=tuple(sections),
            tied=(tied,),
            dataset_len=10**9,
            heldout_len=1,
        ),
        profile=Profile(
            fingerprint=fingerprint,
            device="V100-16GB",
            software="stated",
            microbatches=(
                MicrobatchProfile(microbatch_size=model.microbatch_size, sections=tuple(measured)),
            ),
            optimizer_s_per_byte=1.67e-11,
            within_vm=model.within_vm,
            between_vms=NETWORK,
            task_overhead_s=float(f"{model.copies_s / 3:.3g}"),
            upload_bytes_per_s=12e9,
            download_bytes_per_s=12e9,
            host_optimizer_s_per_byte=3.5e-10,
            origin="written",
            sources=(
                "the sources of this file",
                *([WITHIN_AS_BETWEEN] if model.within_vm is NETWORK else []),
            ),
        ),
        minibatch_size=model.minibatch_size,
        gpu_memory_bytes=16160 << 20,
        usd_per_hour=0.918,
        is_gpu=True,
        host_memory_bytes=112 << 30,
        precision="fp16",
    )


def _sections(model: Published) -> list[tuple[bool, int, bool]]:
    """Return of each section whether it embeds, its layers, whether it has the head."""
    parts = [(False, 1, False)] * model.layers
    if model.ends_apart:
        return [(True, 0, False), *parts, (False, 0, True)]
    return [(True, 1, False), *parts[2:], (False, 1, True)]


def _facts(model: Published, index: int, part: tuple[bool, int, bool], count: int) -> SectionFacts:
    embeds, layers, heads = part
    shape = model.shape
    parameters = layers * shape.layer_parameters + embeds * shape.embedding_parameters
    parameters += (VOCABULARY + 2) * model.hidden if heads else 0
    last = index == count - 1
    return SectionFacts(
        index=index,
        param_bytes=PARAMETER_BYTES * parameters,
        optimizer_bytes=OPTIMIZER_BYTES * parameters,
        activation_bytes_per_example=0 if last else WIRE_BYTES * LENGTH * model.hidden,
        lowered_bytes=PARAMETER_BYTES * layers * shape.matrix_parameters,
        flops_per_example=layers * shape.layer_flops + heads * shape.head_flops,
    )


def _profile(
    model: Published, index: int, part: tuple[bool, int, bool], count: int
) -> SectionProfile:
    embeds, layers, heads = part
    tokens, hidden = model.microbatch_size * LENGTH, model.hidden
    scores = model.heads * LENGTH * tokens
    logits = 6 * tokens * VOCABULARY if heads else 0
    saved = layers * (34 * tokens * hidden + 5 * scores) + logits
    work = layers * max(16 * tokens * hidden, 4 * scores) + 2 * tokens * hidden
    # The gradient of one matrix exists before it is added to the sum.
    matrix = max(4 * layers * hidden**2, (embeds or heads) * VOCABULARY * hidden)
    time = layers + embeds * EMBEDDING_SHARE + heads * model.head_layers
    forward_s = float(f"{time * model.forward_s:.3g}")
    output = 0 if index == count - 1 else model.activation_bytes
    facts = _facts(model, index, part, count)
    return SectionProfile(
        index=index,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        recompute_s=forward_s,
        saved_bytes=saved,
        output_bytes=output,
        batch_bytes=16 * tokens,
        forward_bytes=work + logits,
        recompute_bytes=saved + output,
        backward_bytes=work + logits + 2 * matrix,
        update_bytes=facts.optimizer_bytes,
    )


def _sources(model: Published) -> tuple[str, ...]:
    return (
        (
            f"Not measured: written for the GPT-2 of {model.name.upper().removesuffix('-NVLINK')} parameters of "
            "Varuna (EuroSys 2022), section 7, by scripts/published_profiles.py."
        ),
        (
            f"{model.shape_source} Sequence length 1024: section 3. Vocabulary 50257 padded "
            "to 50304."
        ),
        (
            "Machines: 1-GPU NC6_v3 VMs, 16 GB V100 (16160 MiB as its driver tells), 112 GiB "
            "of CPU RAM, 10 Gbit/s Ethernet (nominal): Varuna section 7."
        ),
        (
            f"forward_s of a layer, {1000 * model.forward_s:g} ms: {model.step_source}, less "
            f"{model.end_s:g} s of reduction and update (assumed), over its "
            f"{model.minibatch_size / model.width / model.microbatch_size:.0f} micro-batches "
            f"and {model.depth - 1} hops, less the copies over PCIe, as 1 : 1 : 2 for "
            "forward, recompute, backward. The head counts by its operations (dissertation "
            "eq. 4.2), the embedding as a twentieth of a layer (assumed)."
        ),
        (
            "param_bytes 4 and optimizer_bytes 8 a parameter: float32 master copy and Adam's "
            "moments. Layers' matrices are converted to float16, not the tied embedding, "
            "which is also looked up. saved_bytes: s b h (34 + 5 a s / h) a layer "
            "(Korthikanti et al. 2022, section 4.1), and 6 bytes a logit. "
            "Peaks of tasks: the two 4 h activations of the MLP or the scores and their "
            "gradient, whichever is larger; in a backward also the gradient of the largest "
            "matrix. Activations between stages are float16 (Varuna section 3)."
        ),
        (
            "Assumed: 12 GB/s each way of PCIe 3.0 x16; 28 bytes of memory traffic a "
            "parameter for Adam, on the CPU at 20 GB/s, on the GPU (and 32 of the undo copy) "
            "at 900 GB/s; 0.5 ms latency. task_overhead_s: activation and gradient cross the "
            "bus in and out (nominal 15.75 GB/s)."
        ),
        "usd_per_hour: 30 % of 3.06, the on-demand price of NC6s_v3 in eastus.",
        *(
            ["Within a VM: NVLink of a V100, 6 links of 25 GB/s each way, 10 us (assumed)."]
            if model.within_vm is NVLINK
            else []
        ),
    )


def main() -> None:
    """Write all files."""
    for model in (*MODELS, ON_NVLINK):
        path = FOLDER / f"varuna-{model.name}.json"
        path.write_text(encode(workload_of(model)) + "\n")


if __name__ == "__main__":
    main()
