"""What stands behind `training.translate`: lines in, translations out, on all ranks together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_vanilla_trm import BATCH_TOKENS, DecodingOptions, Translation, translate_by_length
from training.lines import as_line
from training.long_sentences import join_translations, split_text


@dataclass(frozen=True)
class Translator:
    """Translates lines, on all ranks together.

    Attributes:
        models: One, or an ensemble.
        tokenizer: Theirs.
        options: How to decode.
        batch_tokens: See `translate_by_length`.
        max_source_length: Most tokens of a source, EOS included.
        split: Translate longer ones in parts; else they are refused.
        generator: Draws samples.
    """

    models: Sequence[Any]
    tokenizer: PreTrainedTokenizerBase
    options: DecodingOptions
    batch_tokens: int
    max_source_length: int
    split: bool
    generator: torch.Generator | None = None

    def parts_of(self, line: str, prefix: str, name: str) -> list[str]:
        """Return the parts in which a line is translated; the translation of the first will begin with the prefix.

        Raises:
            ValueError: If it is too long and must not be split, or no translation can begin so; the message says which
                line it is by `name`.
        """
        if not line.strip():
            return [line]
        length = self._count(line)
        tokens = self.tokenizer(text_target=prefix, add_special_tokens=False)["input_ids"] if prefix else []
        cap = self.options.cap_of(min(length, self.max_source_length))
        if len(tokens) >= cap or self.tokenizer.eos_token_id in tokens:
            raise ValueError(f"{name}: no translation of at most {cap} tokens can begin with {prefix!r}")
        if length <= self.max_source_length:
            return [line]
        if not self.split:
            raise ValueError(
                f"{name} has {length} tokens, more than max_source_length ({self.max_source_length}): raise that, or "
                "have such lines translated in parts with --long split"
            )
        try:
            return split_text(line, self.max_source_length, self._count)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, verbose=False)["input_ids"])

    def translate(
        self, parts: Sequence[Sequence[str]], prefixes: Sequence[str], state: PartialState, bar: tqdm
    ) -> list[list[Translation]]:
        """Return the translations of lines in parts, in their order; on other ranks than the main one, none.

        Args:
            parts: Of each line.
            prefixes: With what the translation of each line must begin.
            state: Knows the ranks.
            bar: Counts lines.
        """
        flat = [(line, part) for line, of_line in enumerate(parts) for part in of_line]
        begin = [
            prefixes[line] if number == 0 else ""
            for line, of_line in enumerate(parts)
            for number in range(len(of_line))
        ]
        by_length = sorted(range(len(flat)), key=lambda place: (-len(flat[place][1]), place))
        share = by_length[state.process_index :: state.num_processes]  # even in number and in length
        found = translate_by_length(
            self.models,
            self.tokenizer,
            [flat[place][1] for place in share],
            self.options,
            prefixes=[begin[place] for place in share],
            batch_tokens=self.batch_tokens,
            generator=self.generator,
        )
        done, shown = [], 0
        for place, translations in found:
            done.append((share[place], translations))
            lines = state.num_processes * len(done) * len(parts) // len(flat)
            bar.update(lines - shown)
            shown = lines
        everything = dict(gather_object(done) if state.num_processes > 1 else done)
        if not state.is_main_process:
            return []
        of_lines: list[list[list[Translation]]] = [[] for _ in parts]
        for place, (line, _) in enumerate(flat):
            of_lines[line].append(everything[place])
        return [join_translations(of_line) for of_line in of_lines]


@torch.inference_mode()
def alignments(model: Any, source: Sequence[int], targets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each token of each target the place of the source token that it attends to most.

    Attention is the mean over layers and heads of the cross-attention with which the token was chosen.

    Args:
        model: Its attention kernel must be "eager", which alone tells its probabilities.
        source: Tokens.
        targets: Tokens of translations of it.
    """
    if not source:
        return [[] for _ in targets]
    longest = max(len(target) for target in targets)
    labels = torch.tensor([[*target, *[-100] * (longest - len(target))] for target in targets], device=model.device)
    output = model(
        input_ids=torch.tensor([source], device=model.device).expand(len(targets), -1),
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
        output_attentions=True,
        use_cache=False,
    )
    attention = torch.stack(output.cross_attentions).float().mean(dim=(0, 2))  # (targets, longest, source_length)
    places = attention.argmax(dim=-1).tolist()
    return [row[: len(target)] for row, target in zip(places, targets, strict=True)]


def translate_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    options: DecodingOptions,
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: str | None = None,
) -> list[str]:
    """Return the best translation of each text, as one line, in their order, under a progress bar named `progress`."""
    bar = tqdm(total=len(texts), desc=progress, unit="line", disable=progress is None, leave=False)
    lines = [""] * len(texts)
    with bar:
        for place, found in translate_by_length([model], tokenizer, texts, options, batch_tokens=batch_tokens):
            lines[place] = as_line(found[0].text)
            bar.update()
    return lines
