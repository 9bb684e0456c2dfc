"""Decoding with models: what `VanillaTrmForConditionalGeneration.search` and `sample` do, and the same behind
transformers' `generate(custom_generate=custom_generate)`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from .decoding import BeamSearchOptions, DecodingOptions, Hypothesis, SamplingOptions, Task, decode
from .incremental import Ensemble, IncrementalDecoder
from .layers import shift_right

IGNORED = -100
"""The label of a position that has no target."""

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH, GenerationMode.SAMPLE)
SETTINGS = {
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MaxLengthCriteria": "max_length",
    "EosTokenCriteria": None,
}
"""What `generate` makes of a generation config that our own loops can do too: the setting that it stands for."""
ATTRIBUTES = {"no_repeat_ngram_size": "ngram_size", "bad_words_ids": "bad_word_ids"}
"""Where what `generate` made has a setting's value, if not under its name."""


def search(
    models: Sequence[Any],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    options: DecodingOptions,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    generator: torch.Generator | None = None,
) -> list[list[Hypothesis]]:
    """Translate a batch with one model or the mean of several; see `VanillaTrmForConditionalGeneration.search`."""
    check(models)
    if not len(input_ids):
        return []
    config = models[0].config
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    task = Task(
        mask.sum(dim=1).tolist(),
        token_of(config, "decoder_start_token_id"),
        token_of(config, "eos_token_id"),
        prefixes,
        input_ids.device,
    )
    with torch.inference_mode():
        members = [IncrementalDecoder(model, input_ids, mask, num_beams=options.num_beams) for model in models]
    return decode(members[0] if len(members) == 1 else Ensemble(members), task, options, generator)


def token_of(config: Any, name: str) -> int:
    """A special token of a config.

    Raises:
        ValueError: It is not one token.
    """
    token = getattr(config, name)
    if not isinstance(token, int):
        raise ValueError(f"config.{name} ({token}) must be one token: decoding cannot do without")
    return token


def check(models: Sequence[Any]) -> None:
    """Refuse models that cannot translate, or not together.

    Raises:
        ValueError: A model is in training mode, is not as a whole on one device, or differs from the first in its
            vocabularies or special tokens.
    """
    for model in models:
        if model.training:
            raise ValueError("the model is in training mode: call eval() before it translates")
        parameters = list(model.parameters())
        devices = sorted({str(parameter.device) for parameter in parameters})
        if len(devices) == 1 and devices != [str(models[0].device)]:
            raise ValueError(
                f"the models of an ensemble must be on one device, not {models[0].device} and {devices[0]}"
            )
        if len(devices) != 1 or "meta" in devices:
            raise ValueError(f"a model must be on one device as a whole, not on {devices}: use generate")
        if any(not isinstance(parameter, nn.Parameter) or hasattr(parameter, "placements") for parameter in parameters):
            raise ValueError("the parameters of a model are divided over processes: use generate")
    kinds = {
        "vocabularies": [(model.config.vocab_size, model.lm_head.out_features) for model in models],
        "start tokens": [model.config.decoder_start_token_id for model in models],
        "EOS tokens": [model.config.eos_token_id for model in models],
    }
    for name, values in kinds.items():
        if any(value != values[0] for value in values):
            raise ValueError(f"the models of an ensemble must have the same {name}, not {values}")


@torch.no_grad()
def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Any:
    """For `model.generate(..., custom_generate=custom_generate)`: `generate` prepares, and our own loop decodes.

    Of the generation config it reads the special tokens, `num_beams`, `num_return_sequences`, `do_sample`,
    `temperature`, `top_k`, `top_p`, `max_length` and `max_new_tokens`, `min_length` and `min_new_tokens`,
    `no_repeat_ngram_size`, `bad_words_ids` of one token each, and `max_length_a` and `max_length_b` where it has them.
    `length_penalty` is here the paper's alpha.

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
        ValueError: The config or the caller asks for what these loops cannot do, or a source has fewer hypotheses than
            were asked for.
    """
    check([model])
    check_settings(generation_config, [*logits_processor, *stopping_criteria])
    options = options_of(generation_config, prefix_length=input_ids.size(1))
    copies = max(generation_config.num_beams or 1, options.num_hypotheses)
    hidden_states = model_kwargs["encoder_outputs"][0][::copies]
    mask = model_kwargs.get("attention_mask")
    mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.int64) if mask is None else mask[::copies]
    decoder = IncrementalDecoder(model, None, mask, num_beams=options.num_beams, encoder_hidden_states=hidden_states)
    start, eos = int(input_ids[0, 0]), int(generation_config._eos_token_tensor)
    task = Task(mask.sum(dim=1).tolist(), start, eos, input_ids[::copies, 1:].tolist(), input_ids.device)
    results = decode(decoder, task, options)
    for source, found in enumerate(results):
        if len(found) < options.num_hypotheses:
            raise ValueError(
                f"source {source} has {len(found)} hypotheses, fewer than num_return_sequences "
                f"({options.num_hypotheses}): raise num_beams or the maximum length"
            )
    found_in_order = [hypothesis for found in results for hypothesis in found]
    width = max(len(hypothesis.tokens) for hypothesis in found_in_order)
    pad = int(generation_config._pad_token_tensor)
    rows = [[start, *tokens, *[pad] * (width - len(tokens))] for tokens, _, _ in found_in_order]
    sequences: Any = torch.tensor(rows, device=input_ids.device)
    if not generation_config.return_dict_in_generate:
        return sequences
    scores: Any = torch.tensor([hypothesis.score for hypothesis in found_in_order], device=input_ids.device)
    return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores)


def saved_options(config: Any, **changes: Any) -> BeamSearchOptions:
    """How a model's saved generation config says to search, with some values replaced.

    Its `length_penalty` is here the paper's alpha. `max_length_a` and `max_length_b` are entries of our own, saved in
    generation_config.json like the others. A translation has at least one token before EOS, and none of
    `bad_words_ids`.

    Args:
        config: A `GenerationConfig`. What it lacks is as in the paper, but that it searches greedily without
            `num_beams`, as `generate` does.
        **changes: Fields of `BeamSearchOptions`; None keeps the config's.

    Raises:
        ValueError: A number is out of its range, or `bad_words_ids` has an entry of several tokens.
    """
    saved = {
        "num_beams": config.num_beams or 1,
        "alpha": config.length_penalty,
        "no_repeat_ngram_size": config.no_repeat_ngram_size,
        "max_length_a": getattr(config, "max_length_a", None),
        "max_length_b": getattr(config, "max_length_b", None),
        "min_length": 1,
        "forbidden_tokens": forbidden_tokens(config),
    }
    chosen = saved | {name: value for name, value in changes.items() if value is not None}
    return BeamSearchOptions(**{name: value for name, value in chosen.items() if value is not None})


def forbidden_tokens(config: Any) -> tuple[int, ...]:
    """The tokens of `bad_words_ids`, as `generate` takes it: EOS is never among them.

    Raises:
        ValueError: An entry has several tokens.
    """
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    entries = config.bad_words_ids or []
    if several := [entry for entry in entries if len(entry) != 1]:
        raise ValueError(f"bad_words_ids has {several[0]}: a search of ours can forbid single tokens only")
    return tuple(entry[0] for entry in entries if entry[0] not in eos)


def score_targets(model: Any, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor) -> Tensor:
    """Score given pairs; see `VanillaTrmForConditionalGeneration.token_log_probs`."""
    check([model])
    config, scored = model.config, labels != IGNORED
    decoder_input_ids = shift_right(
        labels, start_token_id=token_of(config, "decoder_start_token_id"), pad_token_id=token_of(config, "pad_token_id")
    )
    logits = model(
        input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids, use_cache=False
    ).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.gather(-1, labels.masked_fill(~scored, 0).unsqueeze(-1)).squeeze(-1)
    log_probs: Tensor = (chosen - logits.logsumexp(dim=-1)).masked_fill(~scored, 0.0)
    return log_probs


def check_settings(config: Any, parts: Sequence[Any]) -> None:
    """Refuse what our loops cannot do.

    Args:
        config: The generation config.
        parts: Logits processors and stopping criteria.

    Raises:
        ValueError: The mode is another, there is not one EOS token, or a part does not stand for the config's setting.
    """
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise ValueError(f"custom_generate cannot do {mode.value}: use generate without it")
    eos = config._eos_token_tensor
    if eos is None or eos.numel() != 1 or config._pad_token_tensor is None:
        raise ValueError(f"custom_generate needs one EOS token ({config.eos_token_id}) and a pad token")
    for part in parts:
        name = type(part).__name__
        setting = SETTINGS.get(name)
        value = getattr(part, ATTRIBUTES.get(str(setting), str(setting)), None)
        if name not in SETTINGS or (setting is not None and value != getattr(config, setting)):
            raise ValueError(f"custom_generate cannot do what {name} stands for: use generate without it")


def options_of(config: Any, *, prefix_length: int = 1) -> DecodingOptions:
    """The options that a generation config comes to; see `custom_generate`.

    Args:
        config: As `generate` has prepared it.
        prefix_length: Of the start token and a forced prefix, by which `min_new_tokens` is counted.
    """
    common: dict[str, Any] = {
        "min_length": max((config.min_length or 0) - 1, (config.min_new_tokens or 0) + prefix_length - 1, 0),
        "max_length": config.max_length - 1,
        "num_hypotheses": config.num_return_sequences or 1,
        "no_repeat_ngram_size": config.no_repeat_ngram_size or 0,
        "forbidden_tokens": forbidden_tokens(config),
        "max_length_a": 0.0,
        "max_length_b": config.max_length - 1,
    }
    for name in ("max_length_a", "max_length_b"):
        if getattr(config, name, None) is not None:
            common[name] = getattr(config, name)
    if config.do_sample:
        limits = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        return SamplingOptions(**common, **{name: value for name, value in limits.items() if value is not None})
    alpha = {} if config.length_penalty is None else {"alpha": config.length_penalty}
    return BeamSearchOptions(num_beams=config.num_beams or 1, **alpha, **common)
