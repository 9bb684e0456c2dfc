"""Pictures of what attends to what: `python -m training.attention --model DIR "a sentence" [--target "a translation"]`.

Writes encoder.png (self-attention of the source), decoder.png (masked self-attention of the target) and cross.png (from
the target to the source), with a row of pictures for each layer and a column for each head.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import matplotlib.font_manager
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Arial Unicode MS", "Noto Emoji")
"""Fonts for tokens, those after the first for the characters that it lacks, where they are installed."""
KINDS: Mapping[str, tuple[str, str, str]] = {
    "encoder": ("source", "source", "encoder self-attention: from each row's token to each column's"),
    "decoder": ("target", "target", "masked decoder self-attention: only to tokens before"),
    "cross": ("target", "source", "cross-attention: from the target's tokens to the source's"),
}
"""The kinds of attention by their field of `AttentionMaps`: whose tokens attend, to whose, and the picture's title."""


@dataclass(frozen=True)
class AttentionMaps:
    """The attention probabilities of one sentence pair; each row of a map is a distribution over its columns.

    Attributes:
        source: Tokens of the source, EOS included.
        target: Tokens of the decoder's input: the start token, then the target without its EOS. The row of each says
            where the decoder looked while it chose the next one.
        encoder: Shape (encoder_layers, heads, source_length, source_length).
        decoder: Shape (decoder_layers, heads, target_length, target_length).
        cross: Shape (decoder_layers, heads, target_length, source_length).
    """

    source: list[str]
    target: list[str]
    encoder: torch.Tensor
    decoder: torch.Tensor
    cross: torch.Tensor


@torch.inference_mode()
def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | Sequence[int] | None = None,
) -> AttentionMaps:
    """Return the attention of a model to a source and a target.

    Args:
        model: In evaluation mode. Its attention kernel becomes "eager", the only one that tells its probabilities.
        tokenizer: The model's own.
        source: One sentence.
        target: Its translation, as a text or as the tokens of a hypothesis; None takes the model's own.

    Raises:
        ValueError: If the source is blank.
    """
    if not source.strip():
        raise ValueError("the sentence is blank: there is nothing to attend to")
    model.set_attn_implementation("eager")
    if target is None:
        target = model.translate(source, tokenizer)
    tokens = tokenizer(text_target=target).input_ids if isinstance(target, str) else list(target)
    source_ids = tokenizer(source, return_tensors="pt").input_ids.to(model.device)
    labels = torch.tensor([tokens], device=model.device)
    decoder_ids = model.prepare_decoder_input_ids_from_labels(labels)
    output = model(input_ids=source_ids, decoder_input_ids=decoder_ids, output_attentions=True, use_cache=False)

    def stack(layers: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(layers)).float().cpu()

    return AttentionMaps(
        source=_readable(tokenizer, source_ids[0].tolist()),
        target=_readable(tokenizer, decoder_ids[0].tolist()),
        encoder=stack(output.encoder_attentions),
        decoder=stack(output.decoder_attentions),
        cross=stack(output.cross_attentions),
    )


def draw_kind(maps: AttentionMaps, kind: str, *, mean_over_heads: bool = False) -> matplotlib.figure.Figure:
    """Return the picture of one of `KINDS`; `mean_over_heads` leaves one map for each layer."""
    rows, columns, title = KINDS[kind]
    probabilities: torch.Tensor = getattr(maps, kind)
    if mean_over_heads:
        probabilities = probabilities.mean(dim=1, keepdim=True)
    figure = draw(probabilities, getattr(maps, rows), getattr(maps, columns), title)
    if mean_over_heads:
        figure.axes[0].set_title("mean over heads", fontsize=8)
    return figure


def draw(maps: torch.Tensor, rows: Sequence[str], columns: Sequence[str], title: str) -> matplotlib.figure.Figure:
    """Return a picture of one kind of attention.

    Args:
        maps: Probabilities, shape (layers, heads, len(rows), len(columns)).
        rows: Tokens that attend.
        columns: Tokens attended to.
        title: Stands above.
    """
    layers, heads = maps.shape[:2]
    # A token takes a tenth of an inch, so that labels can be read.
    width, height = (max(1.2, 0.12 * len(tokens)) for tokens in (columns, rows))
    figure = matplotlib.figure.Figure(figsize=(1.5 + heads * width, 1.5 + layers * height), layout="constrained")
    fonts = [font for font in FONTS if font in matplotlib.font_manager.get_font_names()]
    figure.suptitle(title)
    for layer, axes_of_layer in enumerate(figure.subplots(layers, heads, squeeze=False)):
        for head, axes in enumerate(axes_of_layer):
            axes.imshow(maps[layer, head], vmin=0, vmax=1, cmap="viridis", aspect="auto")
            as_text = {"fontsize": 6, "family": fonts, "parse_math": False}
            axes.set_xticks(range(len(columns)), columns, rotation=90, **as_text)
            axes.set_yticks(range(len(rows)), rows, **as_text)
            axes.tick_params(length=0, labelbottom=layer == layers - 1, labelleft=head == 0)
            if layer == 0:
                axes.set_title(f"head {head + 1}", fontsize=8)
            if head == heads - 1:
                axes.yaxis.set_label_position("right")
                axes.set_ylabel(f"layer {layer + 1}", fontsize=8)
    return figure


def _readable(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return tokens as a reader knows them, spaces visible; a part of a character by its bytes, as ⟨C3⟩."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    texts = [tokenizer.decode([token]) for token in ids]
    for place, (text, piece) in enumerate(zip(texts, tokenizer.convert_ids_to_tokens(list(ids)), strict=True)):
        if "\ufffd" in text and set(piece) <= byte_of.keys():
            texts[place] = "⟨" + " ".join(f"{byte_of[letter]:02X}" for letter in piece) + "⟩"
    return [text.replace(" ", "▁") for text in texts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the three pictures; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw the attention of a model.", allow_abbrev=False)
    parser.add_argument("sentence", help="source sentence")
    parser.add_argument("--model", required=True, help="folder or Hub id of a model with tokenizer")
    parser.add_argument("--target", help="its translation (default: the model's own)")
    parser.add_argument("--output", type=Path, default=Path("attention"), help="folder of the pictures")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    from training.loading import load  # here: a Space has this file, and not that one

    try:
        model, tokenizer = load(options.model)
        maps = attention_maps(model, tokenizer, options.sentence, options.target)
        options.output.mkdir(parents=True, exist_ok=True)
        for kind in KINDS:
            file = options.output / f"{kind}.png"
            draw_kind(maps, kind).savefig(file, dpi=120)
            print(file)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
