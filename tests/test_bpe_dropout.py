"""BPE-dropout against the tokenizer itself, against probabilities worked out by hand, and against a run continued."""

import random
import re

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from training.arguments import parse_arguments
from training.batching import PairCollator, Position
from training.bpe_dropout import SAMPLES, BpeDropout, SegmentedBatches, SegmentedRows
from training.tokenized import Limits, tokenize_pairs
from training.tokenizer import train_tokenizer

TEXTS = [f"the {colour} house of {number} doors" for colour in ("red", "green", "yellow") for number in range(97)]
DRAWS = 20_000


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture(scope="module")
def rows(tokenizer):
    texts = Dataset.from_dict({"source": TEXTS, "target": [text[4:] for text in TEXTS]})
    limits = Limits(max_source_length=50, max_target_length=50, max_length_ratio=None)
    return tokenize_pairs(texts, tokenizer, limits, keep_texts=True)[0]


def with_merges(*merges):
    """A byte-level tokenizer with these merges, the first the one learned first."""
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary += [left + right for left, right in merges]
    model = models.BPE({piece: id_ for id_, piece in enumerate(vocabulary)}, list(merges), unk_token="<unk>")
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", split_special_tokens=True)


def shares(tokenizer, word, rate):
    """How often each segmentation of a word is drawn."""
    bpe_dropout, generator = BpeDropout(tokenizer, rate, seed=0), random.Random(1)
    drawn = [" ".join(bpe_dropout.draw(word, generator)) for _ in range(DRAWS)]
    return {pieces: drawn.count(pieces) / DRAWS for pieces in set(drawn)}


def segmented(rows, tokenizer, *, epoch=0, seed=3, longest=10**6):
    return SegmentedRows(rows, BpeDropout(tokenizer, 0.3, seed), epoch, longest, quiet=True)


@pytest.mark.parametrize("text", [*TEXTS[::50], "", " two  spaces", "Größe ½ 中文 👩‍👧", "a</s>b", "line\nend\r\n"])
def test_without_dropout_it_is_the_tokenizers_own_segmentation(tokenizer, text):
    assert BpeDropout(tokenizer, 0.0, seed=0).segment(text, np.random.default_rng(0)) == tokenizer(text).input_ids


def test_decoding_gives_back_the_text_whatever_was_left_out(tokenizer):
    bpe_dropout, rng = BpeDropout(tokenizer, 0.5, seed=0), np.random.default_rng(0)
    segmentations = [bpe_dropout.segment(TEXTS[5], rng) for _ in range(20)]
    assert len(set(map(tuple, segmentations))) > 10
    assert {tokenizer.decode(ids, skip_special_tokens=True) for ids in segmentations} == {TEXTS[5]}


def test_a_merge_is_left_out_as_often_as_the_rate_says():
    """With one merge ab: whole with probability 1 - p. With a second one, abc: a step is left with nothing to merge."""
    p = 0.3
    spread = 5 * (0.25 / DRAWS) ** 0.5  # five standard deviations at most
    assert shares(with_merges(("a", "b")), "ab", p) == pytest.approx({"ab": 1 - p, "a b": p}, abs=spread)
    in_two_steps = {"abc": (1 - p) ** 2, "ab c": (1 - p) * p, "a b c": p}
    assert shares(with_merges(("a", "b"), ("ab", "c")), "abc", p) == pytest.approx(in_two_steps, abs=spread)


def test_of_the_merges_that_are_not_left_out_the_first_learned_is_made():
    """With ab before bc, abc becomes "ab c" unless ab is left out, then "a bc" unless bc is left out as well."""
    p = 0.3
    spread = 5 * (0.25 / DRAWS) ** 0.5
    expected = {"ab c": 1 - p, "a bc": p * (1 - p), "a b c": p * p}
    assert shares(with_merges(("a", "b"), ("b", "c")), "abc", p) == pytest.approx(expected, abs=spread)


def test_a_text_is_segmented_by_the_seed_the_epoch_and_the_row_alone(rows, tokenizer):
    once, again = segmented(rows, tokenizer), segmented(rows, tokenizer)
    assert [once[row] for row in range(len(rows))] == [again[row] for row in range(len(rows))]
    for other in (segmented(rows, tokenizer, epoch=1), segmented(rows, tokenizer, seed=4)):
        different = sum(once[row] != other[row] for row in range(len(rows)))
        assert different > 0.9 * len(rows)
    lengths = [(len(row["input_ids"]), len(row["labels"])) for row in map(once.__getitem__, range(len(rows)))]
    assert lengths == list(zip(*once.lengths(), strict=True))


def test_words_that_no_longer_fit_in_memory_are_drawn_again_alike(rows, tokenizer):
    forgetful = BpeDropout(tokenizer, 0.3, seed=3)
    forgetful.samples = forgetful.samples.__wrapped__
    once, again = segmented(rows, tokenizer), SegmentedRows(rows, forgetful, 0, 10**6, quiet=True)
    assert once.ids == again.ids
    assert len({tuple(sample) for sample in forgetful.samples("Ġyellow")}) <= SAMPLES


def test_a_row_that_would_be_too_long_keeps_the_tokenizers_own_segmentation(rows, tokenizer):
    longest = max(map(len, rows["input_ids"]))
    free, bound = segmented(rows, tokenizer), segmented(rows, tokenizer, longest=longest)
    too_long = [row for row in range(len(rows)) if max(map(len, free[row].values())) > longest]
    assert 0 < len(too_long) < len(rows)
    for row in range(len(rows)):
        own = {name: rows[row][name] for name in ("input_ids", "labels")}
        assert bound[row] == (own if row in too_long else free[row])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_continues_where_it_was_interrupted(rows, tokenizer, num_workers):
    def batches():
        loading = {"collate": PairCollator(1), "num_workers": num_workers, "pin_memory": False}
        dealing = {"batch_tokens": 100, "seed": 5, "num_ranks": 1, "rank": 0}
        return SegmentedBatches(rows, BpeDropout(tokenizer, 0.3, 5), dealing=dealing, loading=loading)

    whole = list(batches().iterate(2, Position()))
    seen = sum(len(batch["labels"]) for batch, _ in whole)
    assert seen == len(rows)
    assert max(batch[name].numel() for batch, _ in whole for name in ("input_ids", "labels")) <= 100
    _, position = whole[6]
    rest = list(batches().iterate(2, position))
    assert len(rest) == len(whole) - 7
    for (batch, place), (expected, expected_place) in zip(rest, whole[7:], strict=True):
        assert place == expected_place
        assert all(batch[name].equal(expected[name]) for name in expected)


def test_every_rank_segments_alike_and_rows_come_once(rows, tokenizer):
    loading = {"collate": PairCollator(1), "num_workers": 0, "pin_memory": False}
    seen = []
    for rank in range(3):
        dealing = {"batch_tokens": 100, "seed": 5, "num_ranks": 3, "rank": rank}
        batches = SegmentedBatches(rows, BpeDropout(tokenizer, 0.3, 5), dealing=dealing, loading=loading)
        seen.append([batch for batch, _ in batches.iterate(0, Position())])
    assert len({len(batches) for batches in seen}) == 1
    labels = [[id_ for id_ in row if id_ != -100] for of_rank in seen for b in of_rank for row in b["labels"].tolist()]
    texts = sorted(tokenizer.batch_decode(labels, skip_special_tokens=True))
    assert texts == sorted(rows["target"])


def test_a_tokenizer_of_another_kind_is_refused_by_name(tokenizer):
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.ByteLevel()
    lower = with_merges(("a", "b"))
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    finds_special = train_tokenizer(TEXTS, vocab_size=300)
    finds_special.split_special_tokens = False
    of_words = with_merges(("a", "b"))
    of_words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    few_bytes = Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    few_bytes.pre_tokenizer = pre_tokenizers.ByteLevel()
    few_bytes = PreTrainedTokenizerFast(tokenizer_object=few_bytes, eos_token="</s>", split_special_tokens=True)
    for other, said in (
        (few_bytes, "lacks 255 of the 256 bytes"),
        (PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="a"), "Unigram"),
        (lower, "Lowercase"),
        (finds_special, "split_special_tokens is False"),
        (of_words, "of characters"),
    ):
        with pytest.raises(ValueError, match=said):
            BpeDropout(other, 0.1, seed=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bpe_dropout", "1"], r"bpe_dropout \(1.0\) must be at least 0 and below 1"),
        (["--bpe_dropout", "-0.1"], r"bpe_dropout \(-0.1\) must be"),
        (["--bpe_dropout", "0.1", "--streaming", "True"], r"bpe_dropout \(0.1\) needs rows at hand"),
    ],
)
def test_arguments_that_break_a_rule_are_refused(capsys, arguments, said):
    files = ["--train_source", "a", "--train_target", "b", "--output_dir", "c", "--max_updates", "1"]
    with pytest.raises(SystemExit):
        parse_arguments([*files, *arguments])
    assert re.search(said, capsys.readouterr().err)
