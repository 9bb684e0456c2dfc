"""The same model by others, as benchmarks compare with it: Marian of transformers, and torch's `nn.Transformer`.

Each is what a user of that library would write: Marian takes its own loss, and `nn.Transformer` gets embeddings,
positions and masks around it, and the cross entropy of all its logits. Neither is slowed down or helped: what they do
more than ours (`nn.Transformer` also drops attention weights and inner activations, and has a norm after each stack) is
what they do by default.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from hf_vanilla_trm import PARAMETER_SHARING_MODES, VanillaTrmConfig, VanillaTrmForConditionalGeneration
from training.objective import IGNORED, Batch
from training.step_speed import Loss, Step, step_of

PAD, EOS, START = 0, 1, 2
FIRST_WORD = 3
LABEL_SMOOTHING, DROPOUT, LONGEST = 0.1, 0.1, 512


@dataclass(frozen=True)
class System:
    """An implementation to measure.

    Attributes:
        build: Makes a model in training mode, of a size (a value of `SIZES`) and a vocabulary.
        loss: Its loss per target token.
        with_one_dnn: Whether PyTorch may use oneDNN. MarianMT and nn.Transformer use it in bfloat16 alone, ours in
            float32 too.
    """

    build: Callable[[dict[str, int], int], nn.Module]
    loss: Loss
    with_one_dnn: bool = True

    def step(self, size: dict[str, int], vocab_size: int, precision: str) -> Step:
        """Return a function that trains a new model on a batch; see `step_of`."""
        step = step_of(self.build(size, vocab_size), self.loss, precision)
        if self.with_one_dnn:
            return step

        def without_one_dnn(batch: Batch) -> torch.Tensor:
            torch.backends.mkldnn.enabled = False
            try:
                return step(batch)
            finally:
                torch.backends.mkldnn.enabled = True

        return without_one_dnn


def build_ours(size: dict[str, int], vocab_size: int, **options: str) -> VanillaTrmForConditionalGeneration:
    """Return our model as it is trained on a CPU; `options` are further fields of its config."""
    tokens = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": START, "decoder_start_token_id": START}
    options = {"attn_implementation": "eager", **options}
    config = VanillaTrmConfig(vocab_size=vocab_size, dropout=DROPOUT, **tokens, **size, **options)
    return VanillaTrmForConditionalGeneration(config).train()


def our_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return our model's loss, with label smoothing."""
    loss: torch.Tensor = model(**batch, label_smoothing=LABEL_SMOOTHING).loss
    return loss


def build_marian(size: dict[str, int], vocab_size: int, attn_implementation: str) -> nn.Module:
    """Return transformers' MarianMT with the paper's activation and dropout, as it trains by default otherwise."""
    config = MarianConfig(
        vocab_size=vocab_size,
        d_model=size["d_model"],
        encoder_layers=size["encoder_layers"],
        decoder_layers=size["decoder_layers"],
        encoder_ffn_dim=size["d_ff"],
        decoder_ffn_dim=size["d_ff"],
        encoder_attention_heads=size["num_attention_heads"],
        decoder_attention_heads=size["num_attention_heads"],
        activation_function="relu",
        dropout=DROPOUT,
        scale_embedding=True,
        max_position_embeddings=LONGEST,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=START,
        attn_implementation=attn_implementation,
    )
    return MarianMTModel(config).train()


def marian_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return Marian's own loss, which has no label smoothing."""
    loss: torch.Tensor = model(**batch).loss
    return loss


class TorchTransformer(nn.Module):
    """`nn.Transformer` between an embedding with positions and an output projection, which share their matrix."""

    positions: torch.Tensor

    def __init__(self, size: dict[str, int], vocab_size: int) -> None:
        super().__init__()
        d_model = size["d_model"]
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        position, frequency = torch.arange(LONGEST).unsqueeze(1), torch.arange(0, d_model, 2)
        angles = position * torch.exp(frequency * (-math.log(10000.0) / d_model))
        table = torch.zeros(LONGEST, d_model)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("positions", table, persistent=False)
        self.dropout = nn.Dropout(DROPOUT)
        self.transformer = nn.Transformer(
            d_model,
            size["num_attention_heads"],
            size["encoder_layers"],
            size["decoder_layers"],
            size["d_ff"],
            dropout=DROPOUT,
            batch_first=True,
        )
        self.output = nn.Linear(d_model, vocab_size, bias=False)
        self.output.weight = self.embedding.weight

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `(batch, length, d_model)` for `(batch, length)` tokens."""
        embedded = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        output: torch.Tensor = self.dropout(embedded + self.positions[: tokens.size(1)])
        return output

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return logits `(batch, target_length, vocab_size)` for `source` and the decoder's inputs `target`."""
        padding = source == PAD
        length = target.size(1)
        hidden_states = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1),
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=padding,
        )
        logits: torch.Tensor = self.output(hidden_states)
        return logits


def build_torch(size: dict[str, int], vocab_size: int) -> nn.Module:
    """Return a model around torch's `nn.Transformer`."""
    return TorchTransformer(size, vocab_size).train()


def torch_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the cross entropy of all logits."""
    labels = batch["labels"]
    inputs = torch.cat((torch.full_like(labels[:, :1], START), labels[:, :-1]), dim=1)
    logits = model(batch["input_ids"], inputs.masked_fill(inputs == IGNORED, PAD))
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=LABEL_SMOOTHING
    )


MARIAN = {
    "MarianMT": System(functools.partial(build_marian, attn_implementation="sdpa"), marian_loss),
    "MarianMT, eager": System(functools.partial(build_marian, attn_implementation="eager"), marian_loss),
}
"""With the attention kernel that it has by default, and with the one that is faster for short sentences in bfloat16."""
PEERS = MARIAN | {"nn.Transformer": System(build_torch, torch_loss)}


def our_systems(modes: tuple[str, ...] = PARAMETER_SHARING_MODES, precision: str = "fp32") -> dict[str, System]:
    """Return our model with every sharing mode, by the name of the mode; in float32 also the first without oneDNN."""

    def with_mode(mode: str, *, with_one_dnn: bool = True) -> System:
        build = functools.partial(build_ours, parameter_sharing=mode)
        return System(build, our_loss, with_one_dnn)

    systems = {f"ours, {mode}": with_mode(mode) for mode in modes}
    if precision == "fp32":
        systems[f"ours, {modes[0]}, without oneDNN"] = with_mode(modes[0], with_one_dnn=False)
    return systems
