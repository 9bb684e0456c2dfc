"""Decoding with models: what `VanillaTrmForConditionalGeneration.search` does, and the same behind transformers'
`generate(custom_generate=custom_generate)`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from .decoding import BeamSearchOptions, Hypothesis, SamplingOptions, Task, beam_search, sample
from .incremental import Ensemble, IncrementalDecoder

Options = BeamSearchOptions | SamplingOptions

KNOWN_PROCESSORS = (
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MaxLengthCriteria",
    "EosTokenCriteria",
)
"""What `generate` makes of a generation config that the options of our own loops can say too."""


def search(
    models: Sequence[Any],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    options: Options,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    generator: torch.Generator | None = None,
) -> list[list[Hypothesis]]:
    """Translate a batch with one model or the mean of several; see `VanillaTrmForConditionalGeneration.search`."""
    check(models)
    config = models[0].config
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    lengths = mask.sum(dim=1).tolist()
    task = Task(lengths, config.decoder_start_token_id, config.eos_token_id, prefixes, input_ids.device)
    with torch.inference_mode():
        members = [IncrementalDecoder(model, input_ids, mask, num_beams=options.num_beams) for model in models]
    return run(members, task, options, generator)


def run(
    members: Sequence[IncrementalDecoder], task: Task, options: Options, generator: torch.Generator | None = None
) -> list[list[Hypothesis]]:
    """Search or sample, as the options are."""
    model = members[0] if len(members) == 1 else Ensemble(members)
    if isinstance(options, SamplingOptions):
        return sample(model, task, options, generator)
    return beam_search(model, task, options)


def check(models: Sequence[Any]) -> None:
    """Refuse models that cannot translate, or not together.

    Raises:
        ValueError: A model is in training mode, has another vocabulary than the first, or lacks a start or EOS token.
    """
    for model in models:
        if model.training:
            raise ValueError("the model is in training mode: call eval() before it translates")
        for name in ("decoder_start_token_id", "eos_token_id"):
            token = getattr(model.config, name)
            if not isinstance(token, int):
                raise ValueError(f"config.{name} ({token}) must be one token: decoding cannot do without")
            if token != getattr(models[0].config, name):
                raise ValueError(
                    f"the models of an ensemble differ in {name}: {getattr(models[0].config, name)}, {token}"
                )
    sizes = sorted({(model.config.vocab_size, model.lm_head.out_features) for model in models})
    if len(sizes) > 1:
        raise ValueError(f"the models of an ensemble must have the same vocabularies, not of {sizes} words")


@torch.inference_mode()
def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Any:
    """For `model.generate(..., custom_generate=custom_generate)`: `generate` prepares, and our own loop decodes.

    Of the generation config it reads `num_beams`, `num_return_sequences`, `do_sample`, `temperature`, `top_k`, `top_p`,
    `max_length` and `max_new_tokens`, `min_length` and `min_new_tokens`, `no_repeat_ngram_size`, and `max_length_a` and
    `max_length_b` where it has them. `length_penalty` is here the paper's alpha.

    Args:
        model: A `VanillaTrmForConditionalGeneration`.
        input_ids: `(batch * copies, prefix_length)`. The start token and a prefix, a copy for each hypothesis.
        logits_processor: What `generate` made of the config, and the caller's own.
        stopping_criteria: Likewise.
        generation_config: See above.
        **model_kwargs: `encoder_outputs` and `attention_mask`, with copies.

    Returns:
        `(batch * num_return_sequences, length)`, the start token included, padded; with their scores if the config says
        `return_dict_in_generate`.

    Raises:
        ValueError: The config or the caller asks for what these loops cannot do.
    """
    names = [type(part).__name__ for part in (*logits_processor, *stopping_criteria)]
    if unknown := [name for name in names if name not in KNOWN_PROCESSORS]:
        raise ValueError(f"custom_generate cannot do what {', '.join(unknown)} stands for: use generate without it")
    check([model])
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    options = options_of(generation_config, prefix_length=input_ids.size(1))
    mask = model_kwargs.get("attention_mask")
    hidden_states = model_kwargs["encoder_outputs"][0][::copies]
    mask = hidden_states.new_ones(hidden_states.shape[:2]) if mask is None else mask[::copies]
    decoder = IncrementalDecoder(model, None, mask, num_beams=options.num_beams, encoder_hidden_states=hidden_states)
    prefixes = input_ids[::copies, 1:].tolist()
    start, eos = int(input_ids[0, 0]), model.config.eos_token_id
    task = Task(mask.sum(dim=1).int().tolist(), start, eos, prefixes, input_ids.device)
    found = [hypothesis for of_source in run([decoder], task, options) for hypothesis in of_source]
    width = max(len(hypothesis.tokens) for hypothesis in found)
    pad = model.config.pad_token_id
    rows = [[start, *hypothesis.tokens, *[pad] * (width - len(hypothesis.tokens))] for hypothesis in found]
    sequences: Any = torch.tensor(rows, device=input_ids.device)
    if not generation_config.return_dict_in_generate:
        return sequences
    scores = torch.tensor([hypothesis.score for hypothesis in found], device=input_ids.device)
    return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores)


def options_of(config: Any, *, prefix_length: int = 1) -> Options:
    """The options that a generation config comes to; see `custom_generate`.

    Args:
        config: As `generate` has prepared it, or any other.
        prefix_length: Of the start token and a forced prefix, by which `min_new_tokens` is counted.
    """
    least = max((config.min_length or 0) - 1, (config.min_new_tokens or 0) + prefix_length - 1, 0)
    common: dict[str, Any] = {
        "min_length": least,
        "num_hypotheses": config.num_return_sequences or 1,
        "no_repeat_ngram_size": config.no_repeat_ngram_size or 0,
    }
    for name in ("max_length_a", "max_length_b"):
        if getattr(config, name, None) is not None:
            common[name] = getattr(config, name)
    if config.max_length is not None:
        common["max_length"] = config.max_length - 1
    if config.do_sample:
        limits = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        return SamplingOptions(**common, **{name: value for name, value in limits.items() if value is not None})
    alpha = {} if config.length_penalty is None else {"alpha": config.length_penalty}
    return BeamSearchOptions(num_beams=config.num_beams or 1, **alpha, **common)
