"""The decoding loops against exhaustive search over a tiny vocabulary, arithmetic, and transformers' own `generate`."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
)

from hf_vanilla_trm import incremental
from hf_vanilla_trm.decoding import (
    BeamSearchOptions,
    Hypothesis,
    SamplingOptions,
    Task,
    best_continuations,
    decode,
    without,
)
from hf_vanilla_trm.generation import custom_generate, search
from hf_vanilla_trm.incremental import IncrementalDecoder
from hf_vanilla_trm.projections import PackedLinear
from tests.conftest import tiny_model

EOS, START = 2, 0


class Scripted:
    """A step model without weights: log-probabilities are a function of the sentence and of the tokens before."""

    def __init__(self, function, batch, beams, vocab_size):
        self.function, self.vocab_size = function, vocab_size
        self.sentences, self.pasts = list(range(batch)), [[()] * beams for _ in range(batch)]
        self.calls = 0

    def next_log_probs(self, tokens):
        self.calls += 1
        if self.calls > 1:
            rows = zip(self.pasts, tokens.tolist(), strict=True)
            self.pasts = [[(*past, token) for past, token in zip(*row, strict=True)] for row in rows]
        return torch.tensor(
            [
                [self.function(sentence, past) for past in pasts]
                for sentence, pasts in zip(self.sentences, self.pasts, strict=True)
            ],
            dtype=torch.float64,
        )

    def reorder(self, parents):
        self.pasts = [[pasts[beam] for beam in row] for pasts, row in zip(self.pasts, parents.tolist(), strict=True)]

    def keep(self, sentences):
        kept = sentences.tolist()
        self.sentences, self.pasts = [self.sentences[i] for i in kept], [self.pasts[i] for i in kept]


def random_log_probs(vocab_size, sharpness=2.0):
    """A fixed random distribution for every sentence and past."""

    def function(sentence, past):
        generator = torch.Generator().manual_seed(hash((sentence, past)) % 2**31)
        return (sharpness * torch.randn(vocab_size, generator=generator, dtype=torch.float64)).log_softmax(0).tolist()

    return function


def all_hypotheses(function, sentence, vocab_size, cap, alpha, min_length=0):
    """Every sequence that ends with EOS or at the cap, scored from the distribution itself."""
    found = []
    for length in range(1, cap + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            if EOS in tokens[:-1] or (tokens[-1] != EOS and length < cap):
                continue
            if tokens[-1] == EOS and length <= min_length:
                continue
            log_probs = [function(sentence, tokens[:place])[token] for place, token in enumerate(tokens)]
            found.append(Hypothesis(list(tokens), sum(log_probs) / ((5 + length) / 6) ** alpha, log_probs))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("min_length", [0, 2])
def test_with_enough_beams_the_search_finds_the_best_of_all_sequences_in_order(alpha, min_length):
    vocab_size, beams, lengths = 4, 300, [1, 3]  # more beams than sequences: nothing is lost
    function = random_log_probs(vocab_size)
    options = BeamSearchOptions(num_beams=beams, alpha=alpha, max_length_b=1, num_hypotheses=7, min_length=min_length)
    model = Scripted(function, len(lengths), beams, vocab_size)
    results = decode(model, Task(lengths, START, EOS), options)
    for sentence, (found, length) in enumerate(zip(results, lengths, strict=True)):
        expected = all_hypotheses(function, sentence, vocab_size, length + 1, alpha, min_length)[:7]
        assert [hypothesis.tokens for hypothesis in found] == [hypothesis.tokens for hypothesis in expected]
        for own, wanted in zip(found, expected, strict=True):
            assert own.score == pytest.approx(wanted.score, abs=1e-12)
            assert own.token_log_probs == pytest.approx(wanted.token_log_probs, abs=1e-12)


VARIANTS = {
    "plain": {},
    "attention shared": {"parameter_sharing": "attention", "decoder_layers": 3},
    "ffn shared": {"parameter_sharing": "ffn"},
    "all shared": {"parameter_sharing": "all", "decoder_layers": 3},
    "factorised": {"embedding_size": 6},
    "no biases": {"attention_bias": False},
    "output bias": {"output_bias": True, "tie_word_embeddings": False},
    "separate vocabularies": {"decoder_vocab_size": 23, "share_encoder_decoder_embeddings": False},
    "gelu, unscaled": {"activation_function": "gelu", "scale_embedding": False},
}


def searched(model, batch, options, **changes):
    decoder = IncrementalDecoder(model, batch["input_ids"], batch["attention_mask"], num_beams=options.num_beams)
    lengths = batch["attention_mask"].sum(1).tolist()
    return decode(decoder, Task(lengths, START, EOS, **changes), options)


def padded_row(tokens, width):
    return [START, *tokens, *[1] * (width - 1 - len(tokens))]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("beams", [1, 4])
def test_without_length_penalty_the_search_finds_what_generate_finds(batch, variant, beams):
    model = tiny_model(seed=3, decoder_start_token_id=START, **VARIANTS[variant]).double()
    options = BeamSearchOptions(num_beams=beams, alpha=0, max_length_a=0, max_length_b=9, num_hypotheses=beams)
    found = searched(model, batch, options)
    by_beams = {"num_beams": beams, "num_return_sequences": beams, "length_penalty": 0.0, "early_stopping": "never"}
    expected = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        generation_config=GenerationConfig(
            max_new_tokens=9,
            **(by_beams if beams > 1 else {}),
            return_dict_in_generate=True,
            output_scores=True,
            decoder_start_token_id=START,
            eos_token_id=EOS,
            pad_token_id=1,
        ),
    )
    width = expected.sequences.size(1)
    rows = [padded_row(hypothesis.tokens, width) for of_sentence in found for hypothesis in of_sentence]
    assert rows == expected.sequences.tolist()
    if beams > 1:
        scores = [hypothesis.score for of_sentence in found for hypothesis in of_sentence]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-5)


def test_a_score_is_its_tokens_log_probability_over_the_stated_penalty(batch):
    model = tiny_model(seed=3, decoder_start_token_id=START)
    for alpha in (0.0, 0.6, 1.0):
        options = BeamSearchOptions(alpha=alpha, max_length_b=2, num_hypotheses=4)
        for source, found in enumerate(search([model], batch["input_ids"], batch["attention_mask"], options)):
            scores = [hypothesis.score for hypothesis in found]
            assert scores == sorted(scores, reverse=True)
            for tokens, score, token_log_probs in found:
                inputs = torch.tensor([[START, *tokens[:-1]]])
                row = slice(source, source + 1)
                logits = model(batch["input_ids"][row], batch["attention_mask"][row], inputs).logits[0]
                expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert token_log_probs == pytest.approx(expected.tolist(), abs=1e-5)
                assert score == pytest.approx(
                    float(expected.detach().sum()) / ((5 + len(tokens)) / 6) ** alpha, abs=1e-5
                )


def test_a_longer_hypothesis_found_later_wins_by_the_penalty_alone():
    """EOS at once has log-probability -1.0; two words and EOS have -1.1 together, but are twice as long and more."""

    def function(sentence, past):
        log_probs = [-50.0] * 5
        if past == ():
            log_probs[EOS], log_probs[3] = -1.0, math.log(1 - math.exp(-1.0))
        else:
            log_probs[EOS if len(past) == 2 else 4] = (-1.1 - math.log(1 - math.exp(-1.0))) / 2
        return log_probs

    def best(alpha, number=1):
        options = BeamSearchOptions(num_beams=5, alpha=alpha, num_hypotheses=number)
        return decode(Scripted(function, 1, 5, 5), Task([3], START, EOS), options)[0]

    assert best(0.0)[0].tokens == [EOS]
    for alpha in (0.6, 1.0):
        assert best(alpha)[0].tokens == [3, 4, EOS]
        assert best(alpha)[0].score == pytest.approx(-1.1 / (8 / 6) ** alpha)
    for alpha in (0.0, 0.6, 1.0):
        assert best(alpha, number=5)[0] == best(alpha)[0]


@pytest.mark.parametrize("number", [1, 3])
def test_stopping_early_returns_what_going_on_to_the_cap_returns(number):
    """Against a search that is written out here and never stops; random distributions, in which EOS is likely."""
    vocab_size, beams, cap, alpha = 6, 3, 9, 0.6
    inner = random_log_probs(vocab_size)

    def function(sentence, past):
        log_probs = torch.tensor(inner(sentence, past), dtype=torch.float64)
        log_probs[EOS] += 1.0
        return log_probs.log_softmax(0).tolist()

    model = Scripted(function, 8, beams, vocab_size)
    options = BeamSearchOptions(num_beams=beams, alpha=alpha, max_length_a=0, max_length_b=cap, num_hypotheses=number)
    results = decode(model, Task([1] * 8, START, EOS), options)
    for sentence in range(8):
        live, ended = [((), 0.0)], []
        for length in range(1, cap + 1):
            grown = [
                ((*tokens, word), total + log_prob)
                for tokens, total in live
                for word, log_prob in enumerate(function(sentence, tokens))
            ]
            grown.sort(key=lambda candidate: -candidate[1])
            penalty = ((5 + length) / 6) ** alpha
            ended += [(t, total / penalty) for t, total in grown[:beams] if t[-1] == EOS or length == cap]
            live = [candidate for candidate in grown if candidate[0][-1] != EOS][:beams]
        ended.sort(key=lambda candidate: -candidate[1])
        assert [tuple(hypothesis.tokens) for hypothesis in results[sentence]] == [t for t, _ in ended[:number]]
    assert model.calls <= cap


def test_every_source_has_a_cap_of_its_own():
    def never_ending(sentence, past):
        return [-1.0, -1.5, -60.0, -2.0]

    options = BeamSearchOptions(num_beams=2, max_length_a=2, max_length_b=1)
    results = decode(Scripted(never_ending, 3, 2, 4), Task([1, 4, 2], START, EOS), options)
    assert [len(found[0].tokens) for found in results] == [3, 9, 5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sources_translation_depends_on_no_batch_mate(batch, dtype):
    model = tiny_model(seed=3, decoder_start_token_id=START).to(dtype)
    options = BeamSearchOptions(num_beams=3, max_length_b=6, num_hypotheses=3)
    together = search([model], batch["input_ids"], batch["attention_mask"], options)
    for source, length in enumerate((7, 4, 6)):
        (alone,) = search([model], batch["input_ids"][source : source + 1, :length], None, options)
        assert [hypothesis.tokens for hypothesis in alone] == [hypothesis.tokens for hypothesis in together[source]]
        for own, other in zip(alone, together[source], strict=True):
            assert own.score == pytest.approx(other.score, abs=1e-12 if dtype == torch.float64 else 1e-5)


def test_a_source_without_a_token_is_decoded_as_the_model_does(batch):
    model = tiny_model(seed=3, decoder_start_token_id=START)
    batch["attention_mask"][1] = 0
    decoder = IncrementalDecoder(model, batch["input_ids"], batch["attention_mask"], num_beams=1)
    ours = decoder.next_log_probs(torch.full((3, 1), START))
    logits = model(batch["input_ids"], batch["attention_mask"], torch.full((3, 1), START)).logits
    torch.testing.assert_close(ours, logits.log_softmax(-1))


def test_a_translation_begins_with_its_prefix_and_goes_on_as_the_model_would(batch):
    model = tiny_model(seed=3, decoder_start_token_id=START)
    options = BeamSearchOptions(num_beams=3, max_length_b=4)
    free = search([model], batch["input_ids"], batch["attention_mask"], options)
    prefixes = [free[0][0].tokens[:2], [], [9, 5, 9]]
    forced = search([model], batch["input_ids"], batch["attention_mask"], options, prefixes=prefixes)
    assert forced[0][0].tokens == free[0][0].tokens
    assert forced[1] == free[1]
    assert forced[2][0].tokens[:3] == [9, 5, 9]
    inputs = torch.tensor([[START, *forced[2][0].tokens[:-1]]])
    logits = model(batch["input_ids"][2:], batch["attention_mask"][2:], inputs).logits[0]
    own = logits.log_softmax(-1).gather(1, torch.tensor(forced[2][0].tokens)[:, None])[:, 0]
    assert forced[2][0].token_log_probs == pytest.approx(own.tolist(), abs=1e-5)


def test_no_ngram_comes_twice(batch):
    model = tiny_model(seed=5, decoder_start_token_id=START)
    repeated = 0
    for size in (0, 1, 2):
        options = BeamSearchOptions(num_beams=3, max_length_b=11, num_hypotheses=3, no_repeat_ngram_size=size)
        for found in search([model], batch["input_ids"], batch["attention_mask"], options):
            for hypothesis in found:
                width = size or 2
                ngrams = [tuple(hypothesis.tokens[i : i + width]) for i in range(len(hypothesis.tokens) - width + 1)]
                if size:
                    assert len(set(ngrams)) == len(ngrams)
                else:
                    repeated += len(ngrams) - len(set(ngrams))
    assert repeated > 0, "else this model shows nothing"


def test_samples_come_with_the_models_frequencies():
    """Four tokens, one step: 20,000 draws against the distribution, at another temperature and within limits."""
    log_probs = [math.log(p) for p in (0.5, 0.2, 0.05, 0.25)]

    def frequencies(**options):
        limits = SamplingOptions(num_hypotheses=20_000, max_length_a=0, max_length_b=1, **options)
        generator = torch.Generator().manual_seed(0)
        model = Scripted(lambda sentence, past: log_probs, 1, limits.num_beams, 4)
        (found,) = decode(model, Task([1], START, EOS), limits, generator)
        assert {hypothesis.token_log_probs[0] for hypothesis in found} <= set(log_probs)
        counts = torch.tensor([hypothesis.tokens[0] for hypothesis in found]).bincount(minlength=4)
        return (counts / counts.sum()).tolist()

    squares = [0.25, 0.04, 0.0025, 0.0625]
    for options, expected in (
        ({}, [0.5, 0.2, 0.05, 0.25]),
        ({"temperature": 0.5}, [p / sum(squares) for p in squares]),
        ({"top_k": 2}, [0.5 / 0.75, 0, 0, 0.25 / 0.75]),
        ({"top_p": 0.9}, [0.5 / 0.95, 0.2 / 0.95, 0, 0.25 / 0.95]),
        ({"top_p": 0.75}, [0.5 / 0.75, 0, 0, 0.25 / 0.75]),
        ({"min_length": 1}, [0.5 / 0.95, 0.2 / 0.95, 0, 0.25 / 0.95]),
    ):
        assert frequencies(**options) == pytest.approx(expected, abs=0.012), options


def test_the_same_seed_draws_the_same_samples_and_samples_differ(batch):
    model = tiny_model(seed=3, decoder_start_token_id=START)
    options = SamplingOptions(num_hypotheses=4, max_length_b=5)

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return search([model], batch["input_ids"], batch["attention_mask"], options, generator=generator)

    assert drawn(1) == drawn(1) != drawn(2)
    for found in drawn(1):
        assert len({tuple(hypothesis.tokens) for hypothesis in found}) > 1
        for hypothesis in found:
            assert hypothesis.tokens.index(EOS) == len(hypothesis.tokens) - 1 if EOS in hypothesis.tokens else True


def test_an_ensemble_searches_the_mean_of_its_members_probabilities(batch):
    models = [tiny_model(seed=seed, decoder_start_token_id=START) for seed in (3, 4)]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    options = BeamSearchOptions(num_beams=3, max_length_b=4)
    found = search(models, ids, mask, options)
    for source, ((tokens, _, token_log_probs),) in enumerate(found):
        row = slice(source, source + 1)
        inputs = torch.tensor([[START, *tokens[:-1]]])
        mean = sum(model(ids[row], mask[row], inputs).logits[0].softmax(-1) for model in models) / 2
        expected = mean.log().gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert token_log_probs == pytest.approx(expected.tolist(), abs=1e-5)
    twice = search([models[0]] * 2, ids, mask, options)
    alone = search(models[:1], ids, mask, options)
    assert [found[0].tokens for found in twice] == [found[0].tokens for found in alone]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: BeamSearchOptions(num_beams=2, num_hypotheses=3), r"num_beams \(2\) must be at least num_hypotheses"),
        (lambda: BeamSearchOptions(alpha=-0.1), r"alpha \(-0.1\) must be at least 0"),
        (lambda: BeamSearchOptions(alpha=float("nan")), r"alpha \(nan\) must be at least 0"),
        (lambda: BeamSearchOptions(min_length=-1), r"min_length \(-1\) must be at least 0"),
        (lambda: SamplingOptions(temperature=0), r"temperature \(0\) must be more than 0"),
        (lambda: SamplingOptions(top_p=0), r"top_p \(0\) must be more than 0 and at most 1"),
        (lambda: SamplingOptions(num_hypotheses=0), r"num_hypotheses \(0\) must be at least 1"),
        (lambda: BeamSearchOptions(max_length_a=float("inf")), r"max_length_a \(inf\) must be at least 0, and finite"),
        (lambda: BeamSearchOptions(alpha=float("inf")), r"alpha \(inf\) must be at least 0, .* and finite"),
        (lambda: BeamSearchOptions(max_length=2, min_length=3), r"max_length \(2\) .*at least min_length \(3\)"),
        (lambda: BeamSearchOptions(max_length=0), r"max_length \(0\) must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        options()


def test_a_model_that_cannot_translate_says_why(batch):
    model = tiny_model(decoder_start_token_id=START)
    with pytest.raises(ValueError, match="in training mode"):
        model.train().search(batch["input_ids"])
    with pytest.raises(ValueError, match="same vocabularies"):
        model.eval().search(batch["input_ids"], ensemble=[tiny_model(vocab_size=21, decoder_start_token_id=START)])
    with torch.no_grad():
        model.lm_head.weight[4] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        model.search(batch["input_ids"])


COMMON = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1},
        {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never"},
        {"num_beams": 4, "length_penalty": 0.0, "early_stopping": "never", "num_return_sequences": 2},
        {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never", "min_new_tokens": 4},
        {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never", "min_new_tokens": 8},  # and no more
    ],
    ids=lambda settings: ", ".join(f"{name} {value}" for name, value in settings.items()),
)
@pytest.mark.parametrize("prefix", [None, [[START, 9, 5]] * 3], ids=["no prefix", "prefix"])
def test_generate_gives_the_same_with_our_loop_as_without(batch, settings, prefix):
    model = tiny_model(seed=3, decoder_start_token_id=START).double()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if prefix is not None:
        inputs["decoder_input_ids"] = torch.tensor(prefix)
    ours = model.generate(**inputs, **settings, **COMMON, custom_generate=custom_generate)
    expected = model.generate(**inputs, **settings, **COMMON)
    assert ours.sequences.tolist() == expected.sequences.tolist()
    if settings["num_beams"] > 1:
        # transformers leaves the prefix out of its scores.
        count = 0 if prefix is None else len(prefix[0]) - 1
        sums = [score_of_prefix(model, batch, row, settings, prefix) for row in range(len(ours.sequences))]
        for own, wanted, of_prefix in zip(ours.sequences_scores, expected.sequences_scores, sums, strict=True):
            assert float(own) == pytest.approx(float(wanted) + (of_prefix if count else 0.0), abs=1e-5)


def score_of_prefix(model, batch, row, settings, prefix):
    if prefix is None:
        return 0.0
    source = row // settings.get("num_return_sequences", 1)
    ids, mask = (batch[name][source : source + 1] for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        log_probs = model(ids, mask, torch.tensor([prefix[source][:-1]])).logits[0].log_softmax(-1)
    return float(log_probs.gather(1, torch.tensor(prefix[source][1:])[:, None]).sum())


def test_the_length_penalty_of_the_generation_config_is_the_papers_alpha(batch):
    model = tiny_model(seed=3, decoder_start_token_id=START)
    model.generation_config.max_length_a, model.generation_config.max_length_b = 1.0, 2
    ours = model.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        num_beams=3,
        length_penalty=0.6,
        custom_generate=custom_generate,
        **COMMON | {"max_new_tokens": 40},
    )
    options = BeamSearchOptions(num_beams=3, alpha=0.6, max_length_a=1.0, max_length_b=2)
    found = search([model], batch["input_ids"], batch["attention_mask"], options)
    width = ours.sequences.size(1)
    assert ours.sequences.tolist() == [padded_row(hypotheses[0].tokens, width) for hypotheses in found]
    assert ours.sequences_scores.tolist() == pytest.approx([hypotheses[0].score for hypotheses in found], abs=1e-6)


def test_generate_samples_with_our_loop_too(batch):
    model = tiny_model(seed=3, decoder_start_token_id=START)
    given = {"do_sample": True, "num_return_sequences": 4, "top_k": 3, "max_new_tokens": 5}
    torch.manual_seed(0)
    ours = model.generate(batch["input_ids"], **given, custom_generate=custom_generate)
    assert ours.shape[0] == 12
    torch.manual_seed(0)
    options = SamplingOptions(num_hypotheses=4, top_k=3, max_length_a=0, max_length_b=5)
    found = search([model], batch["input_ids"], None, options)
    assert ours.tolist() == [padded_row(one.tokens, ours.size(1)) for of_source in found for one in of_source]


def test_what_our_loop_cannot_do_is_refused_by_name(batch):
    model = tiny_model(decoder_start_token_id=START)
    given = {"max_new_tokens": 5, "custom_generate": custom_generate}
    with pytest.raises(ValueError, match="custom_generate cannot do what RepetitionPenaltyLogitsProcessor stands for"):
        model.generate(batch["input_ids"], **given, repetition_penalty=1.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"])
def test_half_precision_finds_what_full_precision_scores_as_well(batch, dtype):
    """With padding and a source without a token; scores as full precision gives them to the same tokens."""
    model = tiny_model(seed=3, decoder_start_token_id=START)
    batch["attention_mask"][1] = 0
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if dtype == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = model.search(ids, mask, max_length_b=4)
    else:
        found = tiny_model(seed=3, decoder_start_token_id=START).to(dtype).search(ids, mask, max_length_b=4)
    for source, ((tokens, _, token_log_probs),) in enumerate(found):
        row = slice(source, source + 1)
        with torch.no_grad():
            logits = model(ids[row], mask[row], torch.tensor([[START, *tokens[:-1]]])).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert token_log_probs == pytest.approx(expected.tolist(), abs=0.15)


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ([[5]], "there are 1 prefixes for 3 sources"),
        ([[5], [], [9] * 30], r"the prefix of source 2 has 30 tokens, and its translation at most 9"),
        ([[5], [7, EOS], []], r"the prefix of source 1 holds EOS, a forbidden .* number: \[7, 2\]"),
        ([[-1], [], []], r"the prefix of source 0 holds EOS, a forbidden .* number: \[-1\]"),
        ([[], [], [20]], r"a prefix has token 20, of a vocabulary of 20"),
    ],
)
def test_a_prefix_with_which_nothing_can_begin_is_refused(batch, prefixes, message):
    model = tiny_model(decoder_start_token_id=START)
    with pytest.raises(ValueError, match=message):
        model.search(batch["input_ids"], batch["attention_mask"], prefixes=prefixes, max_length_b=3)


def test_rules_for_what_is_found_do_not_hold_for_what_is_given(batch):
    model = tiny_model(seed=3, decoder_start_token_id=START)
    options = {"no_repeat_ngram_size": 1, "max_length_b": 4}
    found = model.search(batch["input_ids"], batch["attention_mask"], prefixes=[[9, 9, 9]] * 3, **options)
    assert all(hypothesis.tokens[:3] == [9, 9, 9] for (hypothesis,) in found)
    assert all(9 not in hypothesis.tokens[3:] for (hypothesis,) in found)


def test_a_batch_of_nothing_has_no_translations():
    model = tiny_model(decoder_start_token_id=START)
    assert model.search(torch.zeros((0, 4), dtype=torch.long)) == []
    assert decode(Scripted(None, 0, 4, 5), Task([], START, EOS), BeamSearchOptions()) == []


def test_what_generate_returns_can_be_trained_on(batch):
    model = tiny_model(seed=3, decoder_start_token_id=START)
    drawn = model.generate(batch["input_ids"], max_new_tokens=5, custom_generate=custom_generate)
    model.train()(batch["input_ids"], labels=drawn[:, 1:]).loss.backward()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_sample": True, "num_beams": 2}, "cannot do beam_sample"),
        ({"eos_token_id": [2, 3]}, r"needs one EOS token \(\[2, 3\]\)"),
        ({"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(3)])}, "NoRepeatNGramLogitsProcessor"),
        ({"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(3)])}, "MaxLengthCriteria"),
    ],
    ids=["beam sampling", "two EOS", "a processor", "a criterion"],
)
def test_what_a_caller_adds_is_refused_and_not_left_out(batch, given, message):
    model = tiny_model(decoder_start_token_id=START)
    with pytest.raises(ValueError, match=message):
        model.generate(batch["input_ids"], max_new_tokens=8, custom_generate=custom_generate, **given)


def test_the_special_tokens_of_the_call_count(batch):
    model = tiny_model(seed=3, decoder_start_token_id=START)
    (first, *_), *_ = (hypotheses[0].tokens for hypotheses in model.search(batch["input_ids"], num_beams=1))
    ended = model.generate(
        batch["input_ids"], max_new_tokens=8, eos_token_id=first, pad_token_id=7, custom_generate=custom_generate
    )
    assert ended[0, 1] == first
    assert (ended[0, 2:] == 7).all()


def test_a_model_in_parts_is_refused(batch):
    model = tiny_model(decoder_start_token_id=START)
    model.lm_head.weight = torch.nn.Parameter(torch.empty(20, 16, device="meta"))
    with pytest.raises(ValueError, match=r"must be on one device as a whole, not on \['cpu', 'meta'\]"):
        model.search(batch["input_ids"])


@pytest.mark.parametrize(
    ("vocab_size", "number"), [(1, 2), (7, 3), (255, 8), (256, 2), (640, 10), (1000, 7), (8001, 8), (37000, 1)]
)
def test_the_best_continuations_are_those_of_topk_over_all(vocab_size, number):
    generator = torch.Generator().manual_seed(vocab_size)
    log_probs = torch.randn(3, 2, vocab_size, generator=generator).log_softmax(-1)
    log_probs[0, 1, vocab_size // 2 :] = float("-inf")
    totals = torch.tensor([[-1.0, -1.5], [-2.0, -1.0], [-1.0, float("-inf")]])
    best, beams, tokens = best_continuations(totals, log_probs, number)
    expected = (log_probs + totals.unsqueeze(-1)).flatten(1).topk(number, dim=1).values
    assert torch.equal(best, expected)
    for row in range(3):
        assert torch.equal(log_probs[row, beams[row], tokens[row]] + totals[row, beams[row]], best[row])
        assert len(set(zip(beams[row].tolist(), tokens[row].tolist(), strict=True))) == number


def test_there_are_no_more_continuations_than_beams_times_tokens():
    best, beams, tokens = best_continuations(torch.zeros(3, 2), torch.zeros(3, 2, 3), 9)
    assert best.shape == beams.shape == tokens.shape == (3, 6)


def test_given_pairs_are_scored_token_by_token(batch):
    """By the softmax of the logits of an ordinary forward pass; padding counts nothing and changes nothing."""
    model = tiny_model(seed=3, decoder_start_token_id=START).double()
    log_probs = model.token_log_probs(batch["input_ids"], batch["labels"], batch["attention_mask"])
    for row in range(3):
        source = batch["input_ids"][row : row + 1, : int(batch["attention_mask"][row].sum())]
        target = batch["labels"][row][batch["labels"][row] != -100]
        inputs = torch.cat((torch.tensor([START]), target[:-1])).unsqueeze(0)
        probabilities = model(input_ids=source, decoder_input_ids=inputs).logits[0].softmax(-1)
        expected = probabilities[torch.arange(len(target)), target].log()
        torch.testing.assert_close(log_probs[row, : len(target)], expected)
        assert not log_probs[row, len(target) :].any()
    assert not log_probs.requires_grad
    with pytest.raises(ValueError, match="in training mode"):
        model.train().token_log_probs(batch["input_ids"], batch["labels"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_a_search_found_is_scored_alike_as_a_given_pair(batch, dtype):
    model = tiny_model(seed=3, decoder_start_token_id=START).to(dtype)
    found = model.search(batch["input_ids"], batch["attention_mask"], num_hypotheses=3, max_length_b=3)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    for row, hypotheses in enumerate(found):
        source = batch["input_ids"][row : row + 1, : int(batch["attention_mask"][row].sum())]
        for hypothesis in hypotheses:
            scored = model.token_log_probs(source, torch.tensor([hypothesis.tokens]))[0]
            assert scored.tolist() == pytest.approx(hypothesis.token_log_probs, abs=tolerance)


@pytest.mark.parametrize("activation_function", ["relu", "gelu"])
@pytest.mark.parametrize("beams", [1, 4])
def test_packed_weights_give_the_same_beams(batch, beams, activation_function, monkeypatch):
    model = tiny_model(seed=3, decoder_start_token_id=START, activation_function=activation_function)
    results = []
    for suits in (PackedLinear.suits, lambda weight, bias: False):
        monkeypatch.setattr(PackedLinear, "suits", suits)
        options = BeamSearchOptions(num_beams=beams, num_hypotheses=beams, max_length_b=5)
        results.append(searched(model, batch, options))
    for packed, plain in zip(*results, strict=True):
        assert [one.tokens for one in packed] == [one.tokens for one in plain]
        for one, other in zip(packed, plain, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-5)


@pytest.mark.parametrize(("sharing", "number"), [("none", 19), ("attention", 11), ("ffn", 15), ("all", 7)])
def test_what_depths_share_is_packed_once(batch, sharing, number, monkeypatch):
    """By hand, for three depths: four maps of attention and two of the feed-forward network each, and the output."""
    packed = []

    class Plain:
        """A packed map on any CPU."""

        def __init__(self, weight, bias, *, relu=False):
            packed.append(weight)
            self.factors, self.after = (weight, bias), torch.relu if relu else torch.clone

        def __call__(self, inputs):
            return self.after(torch.nn.functional.linear(inputs, *self.factors))

        @staticmethod
        def suits(weight, bias):
            return True

    monkeypatch.setattr(incremental, "PackedLinear", Plain)
    model = tiny_model(seed=3, decoder_start_token_id=START, decoder_layers=3, parameter_sharing=sharing)
    model.search(batch["input_ids"], batch["attention_mask"], max_length_b=2)
    assert len(packed) == number


class WithoutCache:
    """A step model that runs the whole decoder on every beam's whole past, at each step."""

    def __init__(self, model, batch, beams):
        self.model, self.source = model, {name: batch[name] for name in ("input_ids", "attention_mask")}
        self.pasts = torch.empty((len(batch["input_ids"]), beams, 0), dtype=torch.long)
        self.swaps = 0

    def next_log_probs(self, tokens):
        self.pasts = torch.cat((self.pasts, tokens.unsqueeze(-1)), dim=-1)
        beams = tokens.size(1)
        source = {name: tensor.repeat_interleave(beams, 0) for name, tensor in self.source.items()}
        logits = self.model(**source, decoder_input_ids=self.pasts.flatten(0, 1), use_cache=False).logits[:, -1]
        return logits.log_softmax(-1).unflatten(0, (-1, beams))

    def reorder(self, parents):
        self.swaps += int((parents != torch.arange(parents.size(1))).sum())
        self.pasts = self.pasts.gather(1, parents.unsqueeze(-1).expand_as(self.pasts))

    def keep(self, sentences):
        self.pasts = self.pasts[sentences]
        self.source = {name: tensor[sentences] for name, tensor in self.source.items()}


@pytest.mark.parametrize(
    "options",
    [
        BeamSearchOptions(num_beams=1, max_length_b=6),
        BeamSearchOptions(num_beams=4, max_length_b=6, num_hypotheses=4),
        SamplingOptions(num_hypotheses=3, max_length_b=6),
    ],
    ids=["greedy", "beam 4", "samples"],
)
def test_the_past_that_is_kept_gives_what_computing_it_anew_gives(batch, options):
    """Also where beams swap, and where sentences leave while others stay."""
    model = tiny_model(seed=3, decoder_start_token_id=START)
    task = Task(batch["attention_mask"].sum(1).tolist(), START, EOS)
    whole = WithoutCache(model, batch, options.num_beams)
    kept = IncrementalDecoder(model, batch["input_ids"], batch["attention_mask"], num_beams=options.num_beams)
    expected, actual = (decode(decoder, task, options, torch.Generator().manual_seed(11)) for decoder in (whole, kept))
    assert [[one.tokens for one in found] for found in actual] == [[one.tokens for one in found] for found in expected]
    for own, theirs in zip(itertools.chain(*actual), itertools.chain(*expected), strict=True):
        assert own.score == pytest.approx(theirs.score, abs=1e-5)
        assert own.token_log_probs == pytest.approx(theirs.token_log_probs, abs=1e-5)
    assert (whole.swaps > 0) == (isinstance(options, BeamSearchOptions) and options.num_beams > 1)


def test_a_sample_that_has_ended_may_have_no_token_left():
    """Every word is followed by one that it has not been, until none is left; EOS has come before that."""
    row = [-1.2, -1.2, -0.9, -60.0]
    options = SamplingOptions(num_hypotheses=4, no_repeat_ngram_size=1, max_length_a=0, max_length_b=9)
    for seed in range(20):
        (found,) = decode(
            Scripted(lambda sentence, past: row, 1, 4, 4),
            Task([3], START, EOS),
            options,
            torch.Generator().manual_seed(seed),
        )
        assert [one.tokens[-1] for one in found] == [EOS] * 4


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_best_of_one_is_the_first_of_five_and_scores_fall(batch, alpha):
    model = tiny_model(seed=3, decoder_start_token_id=START).double()
    best, five = (
        model.search(batch["input_ids"], batch["attention_mask"], num_beams=5, alpha=alpha, num_hypotheses=number)
        for number in (1, 5)
    )
    for (first,), found in zip(best, five, strict=True):
        assert first == found[0]
        scores = [hypothesis.score for hypothesis in found]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(hypothesis.tokens) for hypothesis in found}) == 5


def test_only_what_fills_a_gap_moves_when_sources_leave():
    done = np.array([False, True, False, True, True, False, False])
    remaining = without(done)
    assert sorted(remaining) == [0, 2, 5, 6]
    assert [place for place, origin in enumerate(remaining) if place == origin] == [0, 2]
    assert without(np.array([True, True])).tolist() == []
    assert without(np.array([False, False])).tolist() == [0, 1]


def test_forbidden_tokens_are_neither_found_nor_drawn_and_keep_their_probability(batch):
    """Three tokens are allowed; the log-probabilities of what is found are still those among all twenty."""
    model = tiny_model(seed=3, decoder_start_token_id=START)
    given = {"forbidden_tokens": tuple(set(range(20)) - {EOS, 7, 9}), "num_hypotheses": 2, "max_length_b": 2}
    sources = batch["input_ids"], batch["attention_mask"]
    for found in (model.search(*sources, **given), model.sample(*sources, **given)):
        for row, hypotheses in enumerate(found):
            source = batch["input_ids"][row : row + 1, : int(batch["attention_mask"][row].sum())]
            for one in hypotheses:
                assert set(one.tokens) <= {EOS, 7, 9}
                expected = model.token_log_probs(source, torch.tensor([one.tokens]))[0].tolist()
                assert one.token_log_probs == pytest.approx(expected, abs=1e-5)


def test_forbidden_tokens_must_be_tokens(batch):
    with pytest.raises(ValueError, match=r"forbidden_tokens \(\(3, -1\)\) must not hold a negative number"):
        BeamSearchOptions(forbidden_tokens=(3, -1))
    with pytest.raises(ValueError, match="a forbidden token is 20, of a vocabulary of 20"):
        tiny_model(decoder_start_token_id=START).search(batch["input_ids"], forbidden_tokens=(20,))
