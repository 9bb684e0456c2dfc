"""A translation model for places without transformers: ONNX files, or programs of torch.export.

Both ways write the same two graphs. The encoder runs once for a batch of sentences and the decoder once for each token
that is added to them (sections 3.1, 3.2.3); what the decoder remembers is among its inputs and outputs:

    encoder: input_ids, attention_mask -> encoder_hidden_states, cross
    decoder: decoder_input_ids, attention_mask, cross, past -> logits, present

    input_ids               (batch, source_length), int64
    attention_mask          (batch, source_length), int64; 1 for tokens of the source, 0 for padding
    encoder_hidden_states   (batch, source_length, d_model)
    cross                   (cross_attentions, 2, batch, num_heads, source_length, d_k); keys and values of the source,
                            for each distinct cross-attention: depths that share one share them too
    decoder_input_ids       (batch, 1), int64; the newest tokens, at first the start token
    past                    (decoder_layers, 2, batch, num_heads, past_length, d_k); keys and values of the tokens
                            before the newest, at first of length 0
    logits                  (batch, 1, vocab_size)
    present                 the past of the next step, one longer

Batch, source_length and past_length are free, and lengths have no limit: positions are computed and not looked up.
"""

import importlib
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from .incremental import distinct_cross_attentions
from .modeling_vanilla_trm import VanillaTrmForConditionalGeneration

LEAST_OPSET = 18
"""The oldest version of ONNX's operators that PyTorch translates into."""


def export_onnx(
    model: VanillaTrmForConditionalGeneration, folder: str | os.PathLike[str], *, opset: int | None = None
) -> None:
    """Write `encoder.onnx`, `decoder.onnx`, `config.json` and `generation_config.json`.

    Args:
        model: In float32 and in evaluation mode.
        folder: Made where it does not exist. Weights of more than ONNX's limit of 2 GB stand in a file beside each
            graph.
        opset: Version of ONNX's operators; PyTorch's choice by default.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        ValueError: The model is of another type or precision, or in training mode, or the opset is too old.
    """
    require("onnx", "onnxscript")
    if opset is not None and opset < LEAST_OPSET:
        raise ValueError(f"opset ({opset}) must be at least {LEAST_OPSET}: PyTorch translates into no older one")
    graphs = graphs_of(model)
    path = _prepared(model, folder)
    for graph in graphs:
        with warnings.catch_warnings():
            # The exporter's remarks on itself, and that an axis which several inputs have is named once.
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            warnings.filterwarnings("ignore", "# The axis name: ", UserWarning)
            program = torch.onnx.export(
                graph.module,
                tuple(graph.inputs.values()),
                dynamo=True,
                input_names=list(graph.inputs),
                output_names=graph.outputs,
                dynamic_shapes=graph.dynamic_shapes,
                opset_version=opset,
                verbose=False,
            )
        assert program is not None  # it is only without dynamo
        program.save(path / f"{graph.name}.onnx")


def export_programs(model: VanillaTrmForConditionalGeneration, folder: str | os.PathLike[str]) -> None:
    """Write `encoder.pt2`, `decoder.pt2`, `config.json` and `generation_config.json`.

    `torch.export.load(...).module()` of either file runs where torch alone is installed, on the device that the model
    was on.

    Args:
        model: In float32 and in evaluation mode.
        folder: Made where it does not exist.

    Raises:
        ValueError: The model is of another type or precision, or in training mode.
    """
    graphs = graphs_of(model)
    path = _prepared(model, folder)
    for graph in graphs:
        inputs = tuple(graph.inputs.values())
        program = torch.export.export(graph.module, inputs, dynamic_shapes=graph.dynamic_shapes, strict=False)
        torch.export.save(program, path / f"{graph.name}.pt2")


def require(*names: str) -> list[Any]:
    """Import optional packages.

    Raises:
        ImportError: One is not installed.
    """
    try:
        return [importlib.import_module(name) for name in names]
    except ModuleNotFoundError as error:
        needed = " and ".join(names)
        raise ImportError(f"this needs {needed}: pip install 'hf_vanilla_trm[export]'", name=error.name) from error


def _prepared(model: VanillaTrmForConditionalGeneration, folder: str | os.PathLike[str]) -> Path:
    """The folder, with both configs in it."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    # Not by `config.save_pretrained`, which adds the model's code; and with the defaults, for readers without it.
    model.config.to_json_file(path / "config.json", use_diff=False)
    model.generation_config.save_pretrained(path)
    return path


@dataclass
class Graph:
    """What an exporter is given.

    Attributes:
        name: Of the file.
        module: Computes it.
        inputs: Examples in the order of the module's arguments, by name.
        outputs: Their names.
        dynamic_shapes: Of the inputs, by name: which of their dimensions are free.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: list[str]
    dynamic_shapes: dict[str, dict[int, Any]]


def graphs_of(model: VanillaTrmForConditionalGeneration) -> tuple[Graph, Graph]:
    """The encoder's and the decoder's graph.

    Raises:
        ValueError: The model is of another type or precision, or in training mode.
    """
    config = model.config
    if config.model_type != "vanilla_trm" or not hasattr(model, "lm_head_projection"):
        raise ValueError(
            f"a {type(model).__name__} of type {config.model_type} cannot be exported: it must be a "
            "VanillaTrmForConditionalGeneration"
        )
    if model.training:
        raise ValueError("the model is in training mode: call eval() before it is exported")
    if model.dtype != torch.float32:
        raise ValueError(f"the model's dtype ({model.dtype}) must be torch.float32: call float() before it is exported")
    encoder, decoder = EncoderGraph(model).eval(), DecoderGraph(model).eval()
    # Sizes that all differ: an exporter takes equal ones for the same.
    batch_size, length, past_length = 3, 5, 4
    heads = (batch_size, config.num_attention_heads)
    # Two tensors: an exporter takes one that is given twice for one input.
    tokens, mask = torch.ones((2, batch_size, length), dtype=torch.long, device=model.device).unbind()
    cross = torch.zeros((len(encoder.projections) // 2, 2, *heads, length, decoder.d_k), device=model.device)
    past = torch.zeros((config.decoder_layers, 2, *heads, past_length, decoder.d_k), device=model.device)
    batch, source = Dim("batch"), Dim("source_length")
    sentences = {0: batch, 1: source}
    source_inputs = {"input_ids": tokens, "attention_mask": mask}
    source_shapes = {"input_ids": sentences, "attention_mask": sentences}
    target_inputs = {"decoder_input_ids": tokens[:, :1], "attention_mask": mask, "cross": cross, "past": past}
    target_shapes = {
        "decoder_input_ids": {0: batch},
        "attention_mask": sentences,
        "cross": {2: batch, 4: source},
        "past": {2: batch, 4: Dim("past_length")},
    }
    return (
        Graph("encoder", encoder, source_inputs, ["encoder_hidden_states", "cross"], source_shapes),
        Graph("decoder", decoder, target_inputs, ["logits", "present"], target_shapes),
    )


def encodings(positions: Tensor, d_model: int) -> Tensor:
    """What `layers.sinusoids` gives, in float32: `(length,)` integers to `(length, d_model)`.

    Every cosine is a sine a quarter turn ahead, since not all versions of ONNX Runtime have a cosine in float64.
    """
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)  # 2i
    frequencies = torch.exp(even * (-math.log(10000.0) / d_model)).unsqueeze(-1)  # (d_model / 2, 1)
    turns = torch.tensor((0.0, math.pi / 2), dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[:, None, None] * frequencies + turns  # (length, d_model / 2, 2)
    return angles.sin().flatten(-2).to(torch.float32)


def split_heads(projected: Tensor, d_k: int) -> Tensor:
    """`(batch, length, d_model)` to `(batch, num_heads, length, d_k)`."""
    heads: Tensor = projected.unflatten(-1, (-1, d_k)).transpose(1, 2)
    return heads


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax(Q K^T / sqrt(d_k)) V (section 3.2.1) in few operators; to a source without a token it gives zeros.

    Args:
        query: `(batch, num_heads, query_length, d_k)`.
        key: `(batch, num_heads, key_length, d_k)`.
        value: `(batch, num_heads, key_length, d_k)`.
        mask: `(batch, 1, 1, key_length)`, True where attention may go.

    Returns:
        `(batch, query_length, num_heads * d_k)`.
    """
    scores: Tensor = (query * query.size(-1) ** -0.5) @ key.transpose(-2, -1)
    if mask is None:
        weights = scores.softmax(dim=-1)
    else:
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1) * mask
    return (weights @ value).transpose(1, 2).flatten(2)


class EncoderGraph(nn.Module):
    """The encoder, and the keys and values that the decoder's cross-attention takes from its output.

    Args:
        model: Whose parameters it uses.
    """

    def __init__(self, model: VanillaTrmForConditionalGeneration) -> None:
        super().__init__()
        self.encoder: Any = model.get_encoder()
        self.d_model = model.config.d_model
        self.d_k = self.d_model // model.config.num_attention_heads
        distinct, _ = distinct_cross_attentions(model.get_decoder())
        self.projections = nn.ModuleList(part for cross in distinct for part in (cross.k_proj, cross.v_proj))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Encode sentences; the module's docstring has the shapes."""
        mask = (attention_mask != 0)[:, None, None]  # (batch, 1, 1, source_length)
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden_states = self.encoder.embed(input_ids, None) + encodings(positions, self.d_model)
        for depth in range(self.encoder.num_layers):
            parts = self.encoder.sublayers_at(depth)
            own = parts["self_attn"]
            query, key, value = (
                split_heads(part(hidden_states), self.d_k) for part in (own.q_proj, own.k_proj, own.v_proj)
            )
            attended = own.out_proj(attention(query, key, value, mask))
            hidden_states = parts["self_attn_layer_norm"](hidden_states + attended)
            hidden_states = parts["feed_forward_layer_norm"](hidden_states + parts["feed_forward"](hidden_states))
        projected = [split_heads(projection(hidden_states), self.d_k) for projection in self.projections]
        return hidden_states, torch.stack(projected).unflatten(0, (-1, 2))


class DecoderGraph(nn.Module):
    """One step of the decoder, and the output projection.

    Args:
        model: Whose parameters it uses.
    """

    def __init__(self, model: VanillaTrmForConditionalGeneration) -> None:
        super().__init__()
        self.decoder: Any = model.get_decoder()
        self.lm_head_projection, self.lm_head = model.lm_head_projection, model.lm_head
        self.d_model = model.config.d_model
        self.d_k = self.d_model // model.config.num_attention_heads
        _, self.cross_of_depth = distinct_cross_attentions(self.decoder)

    def forward(
        self, decoder_input_ids: Tensor, attention_mask: Tensor, cross: Tensor, past: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Predict what follows the newest tokens; the module's docstring has the shapes."""
        mask = (attention_mask != 0)[:, None, None]  # (batch, 1, 1, source_length)
        position = torch.arange(past.size(4), past.size(4) + 1, device=past.device)
        hidden_states = self.decoder.embed(decoder_input_ids, None) + encodings(position, self.d_model)
        present = []
        for depth in range(self.decoder.num_layers):
            parts = self.decoder.sublayers_at(depth)
            own, other = parts["self_attn"], parts["cross_attn"]
            query, key, value = (
                split_heads(part(hidden_states), self.d_k) for part in (own.q_proj, own.k_proj, own.v_proj)
            )
            # (2, batch, num_heads, past_length + 1, d_k)
            memory = torch.cat((past[depth], torch.stack((key, value))), dim=-2)
            present.append(memory)
            attended = own.out_proj(attention(query, memory[0], memory[1]))
            hidden_states = parts["self_attn_layer_norm"](hidden_states + attended)
            source = cross[self.cross_of_depth[depth]]
            query = split_heads(other.q_proj(hidden_states), self.d_k)
            attended = other.out_proj(attention(query, source[0], source[1], mask))
            hidden_states = parts["cross_attn_layer_norm"](hidden_states + attended)
            hidden_states = parts["feed_forward_layer_norm"](hidden_states + parts["feed_forward"](hidden_states))
        # By rows: for more dimensions ONNX's product takes a transposed weight, a second copy of a tied embedding.
        logits: Tensor = self.lm_head(self.lm_head_projection(hidden_states.squeeze(1)))  # (batch, vocab_size)
        return logits.unsqueeze(1), torch.stack(present)


class OnnxTranslator:
    """Greedy decoding by ONNX Runtime, on the CPU, from a folder of `export_onnx`.

    Args:
        folder: What `export_onnx` wrote.
        threads: Of ONNX Runtime; 0 leaves the number to it.

    Raises:
        ImportError: onnxruntime is not installed.
        FileNotFoundError: The folder has no configs.
        ValueError: The configs lack a start token, or forbid a sequence of tokens.
    """

    def __init__(self, folder: str | os.PathLike[str], *, threads: int = 0) -> None:
        (runtime,) = require("onnxruntime")
        path = Path(folder)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        generation = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
        start, end = (
            config.get(name) if generation.get(name) is None else generation[name]
            for name in ("decoder_start_token_id", "eos_token_id")
        )
        if start is None:
            raise ValueError(f"decoder_start_token_id (None) in {path} must be a token: decoding begins with it")
        bad_words = generation.get("bad_words_ids") or []
        if several := [entry for entry in bad_words if len(entry) != 1]:
            raise ValueError(f"bad_words_ids in {path} has {several[0]}: only single tokens can be forbidden here")
        self.start: int = start
        self.ends: set[int] = set(end) if isinstance(end, list) else {end}
        self.forbidden = [entry[0] for entry in bad_words if entry[0] not in self.ends]  # as `generate` takes it
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        self.encoder, self.decoder = (
            runtime.InferenceSession(path / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
            for name in ("encoder", "decoder")
        )
        shapes = {given.name: given.shape for given in self.decoder.get_inputs()}
        self.decoder_layers, _, _, self.num_heads, _, self.d_k = shapes["past"]

    def greedy(
        self, input_ids: Sequence[Sequence[int]] | Any, attention_mask: Any = None, max_length: int = 128
    ) -> list[list[int]]:
        """Translate, taking the most probable token at every step.

        Args:
            input_ids: `(batch, source_length)`. Source tokens: lists, a NumPy array or a tensor.
            attention_mask: `(batch, source_length)`. 1 for tokens, 0 for padding; all are tokens where it is None.
            max_length: Tokens of a translation, at most.

        Returns:
            For each source its tokens: behind the start token, EOS included where it came.

        Raises:
            ValueError: `max_length` is below 1.
        """
        if max_length < 1:
            raise ValueError(f"max_length ({max_length}) must be at least 1")
        sources = np.asarray(input_ids, dtype=np.int64)
        if not len(sources):
            return []
        mask = np.ones_like(sources) if attention_mask is None else np.asarray(attention_mask, dtype=np.int64)
        (cross,) = self.encoder.run(["cross"], {"input_ids": sources, "attention_mask": mask})
        past = np.zeros((self.decoder_layers, 2, len(sources), self.num_heads, 0, self.d_k), dtype=np.float32)
        newest = np.full((len(sources), 1), self.start, dtype=np.int64)
        rows: list[list[int]] = [[] for _ in sources]
        for _ in range(max_length):
            inputs = {"decoder_input_ids": newest, "attention_mask": mask, "cross": cross, "past": past}
            logits, past = self.decoder.run(["logits", "present"], inputs)
            logits[..., self.forbidden] = -np.inf
            newest = logits.argmax(axis=-1)
            for row, token in zip(rows, newest[:, 0].tolist(), strict=True):
                if not row or row[-1] not in self.ends:
                    row.append(token)
            if all(row[-1] in self.ends for row in rows):
                break
        return rows
