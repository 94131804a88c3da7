"""What a rank computes of a Llama's block whose matrices several divide, over what one alone does.

CPU time of a forward and a backward on one thread, without the ranks' sums and gathers, by turns; a
part of 1/t of it is what derived times of groups take it to be (``morphing.plan.tensor_groups``).

    python -m tests.bench.bench_parts
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from tests.bench import llama_job
from transformers import LlamaConfig, LlamaForCausalLM

from spottrain import TrainingJob
from spottrain.pipeline.model.checks.repetition import first_tensors
from spottrain.pipeline.model.stage import StageModel, go_backward
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.pipeline.model.tensor_ranks import Absent
from spottrain.pipeline.model.tracer import trace
from spottrain.wire.model import Precision

SHAPES = ((512, 1408), (1024, 2816))
"""Hidden and feed-forward size."""
BLOCK, WARM_UP, TURNS = 1, 3, 15


def llama(hidden: int, feed_forward: int) -> TrainingJob:
    def model() -> LlamaForCausalLM:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=llama_job.VOCABULARY,
                hidden_size=hidden,
                num_hidden_layers=3,
                num_attention_heads=8,
                num_key_value_heads=8,
                intermediate_size=feed_forward,
                use_cache=False,
            )
        )

    return replace(llama_job.job(), model=model)


def ways(job: TrainingJob, precision: Precision, examples: int) -> dict[str, Callable[[], None]]:
    """Return a forward and a backward of the block, by who computes it."""
    layout, tensors = trace(job), first_tensors(job, trace(job))
    batch = torch.stack([job.dataset[index] for index in range(examples)])
    shape = layout.cuts[BLOCK - 1].crossing[0].shape(examples)

    def way(shards: Shards) -> Callable[[], None]:
        own = {section: shards.own_parts(whole) for section, whole in tensors.items()}
        blocks = range(BLOCK, BLOCK + 1)
        stage = StageModel(job, layout, blocks, own, precision=precision, shards=shards)
        in_parts = shards.size if shards.split.names else 1
        given = torch.randn(shape).chunk(in_parts, -2)[0]

        def run() -> None:
            received = [given.clone()]
            stage.require_gradients(received)
            made = stage.forward(batch, received, int)
            assert isinstance(made, list)
            go_backward(made, [torch.ones_like(one) for one in made])

        return run

    return {
        "alone": way(ALONE),
        "t = 2": way(Shards.of(layout, Absent(2), sequence=False)),
        "t = 4": way(Shards.of(layout, Absent(4), sequence=False)),
        "t = 2, sequence": way(Shards.of(layout, Absent(2), sequence=True)),
    }


def main() -> None:
    torch.set_num_threads(1)
    for hidden, feed_forward in SHAPES:
        for precision in ("fp32", "bf16"):
            for examples in (1, 4):
                runs = ways(llama(hidden, feed_forward), precision, examples)
                times_s: dict[str, list[float]] = {name: [] for name in runs}
                for turn in range(WARM_UP + TURNS):
                    for name, run in runs.items():
                        began = time.process_time()
                        run()
                        if turn >= WARM_UP:
                            times_s[name].append(time.process_time() - began)
                alone_s, *parts = (statistics.median(own) for own in times_s.values())
                shares = zip([*runs][1:], parts, strict=True)
                told = ", ".join(f"{name}: {own_s / alone_s:.2f}" for name, own_s in shares)
                print(f"hidden {hidden:4}, {precision}, {examples} examples: {told}", flush=True)


if __name__ == "__main__":
    main()
