"""What training costs, from the architecture alone: `python -m training.cost --config FILE.yaml [--gpus 1 8 ...]`.

Products are counted as 2 operations for each multiplication and addition, and three times: once forward, twice backward
(by the input and by the weights). Memory is what parameters, gradients and Adam's moments take, and what layers keep
for the backward pass. Time follows from a card's rate and the part of it that training reaches, which are assumptions.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration
from training.arguments import parse_arguments, positive_integer

BYTES_PER_PARAMETER = 16
"""Float32 parameter, gradient, and Adam's two moments."""


@dataclass(frozen=True)
class BatchShape:
    """A batch, padding included.

    Attributes:
        rows: Sentence pairs.
        source_length: Tokens of each source.
        target_length: Tokens of each target.
    """

    rows: int
    source_length: int
    target_length: int


def count_parameters(config: VanillaTrmConfig) -> int:
    """Return the number of unique parameters."""
    with torch.device("meta"):
        return VanillaTrmForConditionalGeneration(config).num_parameters()


def training_flops(config: VanillaTrmConfig, batch: BatchShape) -> int:
    """Return the operations of the matrix products of one step, forward and backward."""
    source, target = batch.source_length, batch.target_length
    d, d_ff = config.d_model, config.d_ff
    width = config.embedding_size or d
    # Multiplications with additions of one sentence pair. Attention: projections, then scores and weighted sums.
    encoder = source * (4 * d * d + 2 * d * d_ff) + 2 * source * source * d
    self_attention = target * 4 * d * d + 2 * target * target * d
    cross_attention = target * 2 * d * d + source * 2 * d * d + 2 * target * source * d
    decoder = self_attention + cross_attention + target * 2 * d * d_ff
    projections = (source + 2 * target) * width * d if width != d else 0
    output = target * width * (config.decoder_vocab_size or config.vocab_size)
    forward = config.encoder_layers * encoder + config.decoder_layers * decoder + projections + output
    return 2 * 3 * batch.rows * forward


def layer_activation_bytes(config: VanillaTrmConfig, batch: BatchShape, *, bits: int = 32) -> int:
    """Return what the layers keep for the backward pass, with a kernel that keeps no attention probabilities.

    A layer keeps its queries, keys and values, the attention's output, each residual sum and each LayerNorm's output,
    the inner layer of the feed-forward network, and the masks of dropout.

    Args:
        config: The architecture.
        batch: The batch.
        bits: Of an activation: 32, or 16 with autocast, for which this is rough: LayerNorm's input and output are
            counted at 32, and not autocast's copies of what several layers read.
    """
    d, d_ff = config.d_model, config.d_ff
    source, target = batch.rows * batch.source_length, batch.rows * batch.target_length
    mask = 8 if config.dropout else 0
    norm, softmax = 2 * 32, config.num_attention_heads * 32  # a mean and a deviation; the sum of each head
    encoder = source * ((4 * d + d_ff) * bits + 4 * d * 32 + 2 * d * mask + 2 * norm + softmax)
    of_source = source * 2 * d * bits  # keys and values of cross-attention
    of_target = target * ((6 * d + d_ff) * bits + 6 * d * 32 + 3 * d * mask + 3 * norm + 2 * softmax)
    return (config.encoder_layers * encoder + config.decoder_layers * (of_source + of_target)) // 8


def training_memory(config: VanillaTrmConfig, batch: BatchShape, *, autocast: bool) -> int:
    """Return the bytes of training on an accelerator: parameters, moments, activations; less than what it will take."""
    bits = 16 if autocast else 32
    copies = 2 * count_parameters(config) if autocast else 0  # autocast's own copies of the matrices
    fixed = BYTES_PER_PARAMETER * count_parameters(config) + copies
    return fixed + layer_activation_bytes(config, batch, bits=bits)


def update_seconds(flops: int, parameters: int, gpus: int, *, rate: float, bandwidth: float) -> float:
    """Return the time of an update of a fixed size, shared by some GPUs.

    The products take flops / (gpus * rate). The ring all-reduce of float32 gradients moves 2 (gpus - 1) / gpus of them
    over each link; DDP hides it behind the backward pass, two thirds of the products' time.

    Args:
        flops: Of the whole update.
        parameters: Of the model.
        gpus: Cards.
        rate: Operations a second that a card reaches in training.
        bandwidth: Bytes a second of a link between cards.
    """
    products = flops / (gpus * rate)
    all_reduce = 2 * (gpus - 1) / gpus * 4 * parameters / bandwidth
    return products + max(0.0, all_reduce - products * 2 / 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the configuration needs; return the exit code."""
    parser = argparse.ArgumentParser(description="Estimate what training costs.", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="YAML file of training")
    parser.add_argument("--gpus", type=positive_integer, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of cards")
    parser.add_argument("--length", type=positive_integer, default=28, help="mean tokens of a sentence")
    parser.add_argument("--teraflops", type=float, default=312, help="peak of a card in the precision of training")
    parser.add_argument("--utilisation", type=float, default=0.35, help="part of the peak that training reaches")
    parser.add_argument("--gigabytes_per_second", type=float, default=100, help="bandwidth of a link between cards")
    options = parser.parse_args(arguments)
    model, data, recipe = parse_arguments(["--config", options.config])
    if recipe.max_updates is None:
        parser.error(f"{options.config} has no max_updates: how long it trains is not known")
    config = VanillaTrmConfig(vocab_size=data.vocab_size, **model.given())
    rows = recipe.batch_tokens // options.length
    if rows == 0:
        parser.error(f"--length ({options.length}) must be at most batch_tokens ({recipe.batch_tokens})")
    batch = BatchShape(rows, options.length, options.length)
    parameters, steps = count_parameters(config), recipe.gradient_accumulation_steps
    flops = steps * training_flops(config, batch)
    tokens = steps * rows * options.length
    autocast = recipe.mixed_precision in ("bf16", "fp16")
    memory = training_memory(config, batch, autocast=autocast)
    print(f"parameters             {parameters:,}")
    print(f"target tokens          {tokens:,} an update, {tokens * recipe.max_updates:.3g} in {recipe.max_updates:,}")
    print(f"operations             {flops:.3g} an update, {flops * recipe.max_updates:.3g} in all")
    print(f"memory, at least       {memory / 2**30:.1f} GiB on one card with batches of {recipe.batch_tokens:,} tokens")
    rate = options.teraflops * 1e12 * options.utilisation
    print(f"assumed                {rate / 1e12:.0f} TFLOP/s reached, {options.gigabytes_per_second:g} GB/s a link")
    print("An update of this size, shared by some cards, batch_tokens / GPUs on each:")
    print("GPUs   target tokens/s   of linear   hours   GPU hours")
    link = options.gigabytes_per_second * 1e9
    alone = update_seconds(flops, parameters, 1, rate=rate, bandwidth=link)
    for gpus in options.gpus:
        seconds = update_seconds(flops, parameters, gpus, rate=rate, bandwidth=link)
        hours = seconds * recipe.max_updates / 3600
        efficiency = alone / seconds / gpus
        print(f"{gpus:4d} {tokens / seconds:17,.0f} {efficiency:10.0%} {hours:7.1f} {gpus * hours:11.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
