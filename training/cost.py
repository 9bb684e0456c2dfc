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
from training.arguments import (
    DataArguments,
    ModelArguments,
    RecipeArguments,
    parse_arguments,
    positive_integer,
    positive_number,
)

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


@dataclass(frozen=True)
class Hardware:
    """What an estimate of time assumes: by default cards of 312 TFLOP/s in bf16 and links of 100 GB/s.

    Attributes:
        gpus: Numbers of cards to estimate for.
        teraflops: Peak of a card in the precision of training.
        utilisation: Part of the peak that training reaches.
        gigabytes_per_second: Bandwidth of a link between cards.
    """

    gpus: Sequence[int] = (1, 2, 4, 8, 16)
    teraflops: float = 312
    utilisation: float = 0.35
    gigabytes_per_second: float = 100


def describe_cost(
    model: ModelArguments, data: DataArguments, recipe: RecipeArguments, hardware: Hardware, length: int = 28
) -> str:
    """Return parameters, operations, memory and hours of a run, as lines.

    Args:
        model: The architecture.
        data: Says the size of the vocabulary.
        recipe: Batches and updates.
        hardware: What is assumed.
        length: Mean tokens of a sentence.

    Raises:
        ValueError: If the recipe does not say how many updates there are, or a batch holds not one sentence.
    """
    if recipe.max_updates is None:
        raise ValueError("there is no max_updates: how long training takes is not known")
    config = VanillaTrmConfig(vocab_size=data.vocab_size, **model.given())
    rows = recipe.batch_tokens // length
    if rows == 0:
        raise ValueError(f"the length of a sentence ({length}) must be at most batch_tokens ({recipe.batch_tokens})")
    batch = BatchShape(rows, length, length)
    parameters, steps = count_parameters(config), recipe.gradient_accumulation_steps
    flops, tokens = steps * training_flops(config, batch), steps * rows * length
    autocast = recipe.mixed_precision in ("bf16", "fp16")
    memory = training_memory(config, batch, autocast=autocast) / 2**30
    rate, link = hardware.teraflops * 1e12 * hardware.utilisation, hardware.gigabytes_per_second * 1e9
    from_elsewhere = data.tokenizer is not None or recipe.initial_weights is not None
    assumed = " (assumed: the tokenizer given is not read)" if from_elsewhere else ""
    vocabulary = f"with a vocabulary of {data.vocab_size:,}{assumed}"
    lines = [
        f"parameters             {parameters:,} ({parameters / 1e6:.1f}M) {vocabulary}",
        f"target tokens          {tokens:,} an update, {tokens * recipe.max_updates:.3g} in {recipe.max_updates:,}",
        f"operations             {flops:.3g} an update, {flops * recipe.max_updates:.3g} in all",
        f"memory, at least       {memory:.1f} GiB on one card with batches of {recipe.batch_tokens:,} tokens",
        f"assumed                {rate / 1e12:.0f} TFLOP/s reached, {hardware.gigabytes_per_second:g} GB/s a link",
        "An update of this size, shared by some cards, batch_tokens / GPUs on each:",
        "GPUs   target tokens/s   of linear   hours   GPU hours",
    ]
    alone = update_seconds(flops, parameters, 1, rate=rate, bandwidth=link)
    for gpus in hardware.gpus:
        seconds = update_seconds(flops, parameters, gpus, rate=rate, bandwidth=link)
        hours = seconds * recipe.max_updates / 3600
        efficiency = alone / seconds / gpus
        lines.append(f"{gpus:4d} {tokens / seconds:17,.0f} {efficiency:10.0%} {hours:7.1f} {gpus * hours:11.1f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the configuration needs; return the exit code."""
    default = Hardware()
    parser = argparse.ArgumentParser(description="Estimate what training costs.", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="YAML file of training")
    parser.add_argument("--gpus", type=positive_integer, nargs="+", default=default.gpus, help="numbers of cards")
    parser.add_argument("--length", type=positive_integer, default=28, help="mean tokens of a sentence")
    parser.add_argument("--teraflops", type=positive_number, default=default.teraflops, help="peak of a card")
    parser.add_argument(
        "--utilisation", type=positive_number, default=default.utilisation, help="part of it that is reached"
    )
    parser.add_argument(
        "--gigabytes_per_second",
        type=positive_number,
        default=default.gigabytes_per_second,
        help="bandwidth between cards",
    )
    options = parser.parse_args(arguments)
    hardware = Hardware(options.gpus, options.teraflops, options.utilisation, options.gigabytes_per_second)
    try:
        print(describe_cost(*parse_arguments(["--config", options.config]), hardware, options.length))
    except ValueError as error:
        parser.error(f"{options.config}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
