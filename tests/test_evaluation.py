"""Loss per token, and the metrics of real decoding."""

import math
import socket
from pathlib import Path

import pytest
import sacrebleu
import torch
from accelerate import Accelerator
from datasets import Dataset

import training
from tests.conftest import tiny_model
from tests.updates import LENGTHS, make_rows
from training.evaluation import (
    Evaluator,
    TranslationMetric,
    evaluate_loss,
    lower_is_better,
    spaced_rows,
    translate_on_all_ranks,
)
from training.tokenized import Limits, tokenize_pairs
from training.tokenizer import train_tokenizer
from training.translator import translate_all

REFERENCES = ["Der Hund läuft über die Wiese .", "Eine Frau liest ein Buch .", "Zwei Kinder spielen im Park ."]
PREDICTIONS = ["Der Hund läuft über eine Wiese .", "Eine Frau liest ein Buch .", "Zwei Kinder im Park spielen ."]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(REFERENCES * 3, vocab_size=300)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[row] for row in range(8)], [[0, 1, 2, 3, 4], [5, 6, 7]]]
)
def test_the_loss_is_the_mean_negative_log_probability_of_all_targets_however_batched(split):
    model = tiny_model()
    log_probabilities = []
    for batch in make_rows([[row] for row in range(8)]):
        with torch.no_grad():
            scores = model(**batch).logits.log_softmax(-1)
        log_probabilities.append(scores[0].gather(1, batch["labels"][0, :, None]))
    expected = -torch.cat(log_probabilities).mean().item()
    assert len(torch.cat(log_probabilities)) == sum(target for _, target in LENGTHS)
    scores = evaluate_loss(model, make_rows(split), Accelerator(cpu=True))
    assert scores["loss"] == pytest.approx(expected, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


def test_metrics_agree_with_sacrebleu_and_need_no_network(no_network):
    scores = TranslationMetric().compute(predictions=PREDICTIONS, references=REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score
    assert scores["exact_match"] == pytest.approx(100 / 3)
    assert 20 < scores["bleu"] < 90
    assert "tok:13a" in scores["bleu_signature"]
    assert f"version:{sacrebleu.__version__}" in scores["bleu_signature"]
    assert "nc:6" in scores["chrf_signature"]


def test_equal_translations_score_100_and_the_order_of_rows_matters_to_exact_match():
    metric = TranslationMetric()
    equal = metric.compute(predictions=REFERENCES, references=REFERENCES)
    assert (equal["bleu"], equal["chrf"], equal["exact_match"]) == pytest.approx((100, 100, 100))
    assert metric.compute(predictions=REFERENCES[::-1], references=REFERENCES)["exact_match"] == pytest.approx(100 / 3)


def test_chinese_is_scored_by_characters_when_asked_for():
    sources = ["我们今天去公园", "他在读书"]
    scores = TranslationMetric("zh").compute(predictions=["我们明天去公园", "他在读书"], references=sources)
    assert scores["bleu"] == sacrebleu.corpus_bleu(["我们明天去公园", "他在读书"], [sources], tokenize="zh").score
    assert "tok:zh" in scores["bleu_signature"]


def test_the_metric_of_papers_on_multi30k_is_bleu_of_lower_cased_tokens(no_network):
    """The expected tokens are written by hand: lower case, quotation marks plain and as Moses escapes them."""
    name = str(Path(training.__file__).parent / "metrics" / "multi30k_bleu.py")
    metric = TranslationMetric("13a", [name])
    predictions = ["Ein Mann sagt „hallo“.", "Zwei Hunde, ein Ball und drei Katzen im Park!"]
    references = ['EIN Mann sagt "Hallo".', "Zwei Hunde, ein Ball und vier Katzen im Park!"]
    score = metric.compute(predictions=predictions, references=references)["multi30k_bleu"]
    said = "ein mann sagt &quot; hallo &quot; ."
    tokens = "zwei hunde , ein ball und {} katzen im park !"
    bleu = sacrebleu.BLEU(tokenize="none", force=True)
    expected = bleu.corpus_score([said, tokens.format("drei")], [[said, tokens.format("vier")]]).score
    assert score == pytest.approx(expected)
    assert metric.compute(predictions=predictions, references=references)["bleu"] < score - 5


def test_an_unknown_tokenizer_of_bleu_is_refused_before_anything_is_decoded():
    with pytest.raises(ValueError, match=r"bleu_tokenize \('nonsense'\)"):
        TranslationMetric("nonsense")


@pytest.mark.parametrize(
    ("rows", "wanted", "expected"),
    [(10, 5, [0, 2, 4, 6, 8]), (3, 5, [0, 1, 2]), (7, 1, [0]), (7, 0, []), (7, 7, list(range(7)))],
)
def test_chosen_rows_are_spread_over_the_split(rows, wanted, expected):
    assert spaced_rows(rows, wanted) == expected


def test_translations_come_back_in_order(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    texts = ["Buch", "Zwei Kinder spielen im Park .", "", "Eine Frau liest", "die Wiese", "Hund und Kinder im Buch"]
    config = model.search_options(max_length_b=3)
    accelerator = Accelerator(cpu=True)
    got = translate_on_all_ranks(model, tokenizer, texts, config, accelerator=accelerator, batch_tokens=64)
    assert got == [translate_all(model, tokenizer, [text], config)[0] for text in texts]
    assert len(set(got)) == len(texts)


def test_an_evaluator_scores_every_row_against_its_own_reference(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), dropout=0.5)
    model.generation_config.max_length_b = 3
    config = model.search_options()
    sources = REFERENCES + [text[5:] for text in REFERENCES] + [""]
    answers = translate_all(model, tokenizer, sources, config)
    targets = [*answers[:5], "another", ""]  # 6 of 7 are what the model says; one row is empty
    split = Dataset.from_dict({"source": sources, "target": targets})
    tokenized, _ = tokenize_pairs(split, tokenizer, Limits(90, 90), drop=False)
    evaluator = Evaluator(
        split,
        tokenized,
        tokenizer,
        metric=TranslationMetric(),
        accelerator=Accelerator(cpu=True),
        batch_tokens=300,
        eval_batch_tokens=400,
        num_samples=3,
    )
    assert evaluator.final(model.train())["exact_match"] == pytest.approx(100 * 6 / 7)
    assert evaluator.during_training(model.train(), max_rows=2, num_beams=1)["exact_match"] == 100


@pytest.mark.parametrize(
    ("name", "lower"),
    [("loss", True), ("ter", True), ("character", True), ("charcut_mt", True), ("bleu", False), ("chrf", False)],
)
def test_of_errors_less_is_better(name, lower):
    assert lower_is_better(name) == lower
