"""Fine-tuning with Hugging Face's Trainer, from a checkpoint and text files to folders that the Auto classes load."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import sacrebleu
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from huggingface_hub import HfApi
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    GenerationConfig,
    MarianConfig,
    Seq2SeqTrainer,
)

import training.finetune
import training.launching
from tests.conftest import tiny_model
from tests.hub import WRITER, Hub
from tests.launch import CLONE, PYTHON, TWO_RANKS, run
from tests.pairs import write_reversed_pairs
from tests.updates import LENGTHS
from training import publish
from training.arguments import PairArguments, parse_dataclasses
from training.batching import PairCollator
from training.card import read_run, render_card
from training.data import load_pairs
from training.evaluation import TranslationMetric
from training.finetune import CardArguments, FineTuningArguments, TrainerArguments, main, newest_checkpoint
from training.run_log import RunLog, weights_digest
from training.tokenizer import train_tokenizer
from training.trainer import FineTuningTrainer, SeededSampler, make_compute_metrics
from training.translator import translate_all

PUSH = ["--push_to_hub", "--hub_model_id", "tester/tuned"]
CARD = ["--license", "mit", "--language", "en de", "--datasets", "tester/words"]
WORDS = ["der", "die", "das", "hund", "katze", "haus", "baum", "liest", "sieht", "findet", "einen", "kleinen", "roten"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT asks by the old name
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # huggingface_hub of its HTTP client
]


# What is fine-tuned ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """60 and 11 sentences; the target is the source with its words reversed."""
    rows = {"train": 60, "validation": 11}
    files = write_reversed_pairs(tmp_path_factory.mktemp("data"), WORDS, rows, lengths=5)
    return [word for name, file in files.items() for word in (f"--{name}", str(file))]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(WORDS)] * 3, vocab_size=280)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """A checkpoint as `training.train` writes them, with decoding settings of its own."""
    folder = tmp_path_factory.mktemp("base")
    # With these weights each number of beams finds other translations.
    model = tiny_model(seed=3, vocab_size=len(tokenizer), bos_token_id=0, decoder_start_token_id=0)
    model.generation_config = generation_config()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generation_config(**changes):
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    decoding = {"num_beams": 3, "length_penalty": 2.0, "max_new_tokens": 40, "max_length_a": 0.5, "max_length_b": 2}
    return GenerationConfig(**tokens | decoding | changes)


def tiny_flags(data, base, output_dir):
    """Six updates of 12 rows; an epoch has five."""
    options = {"model": base, "dropout": 0.1, "max_steps": 6, "per_device_train_batch_size": 12}
    every = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    options |= every | {"learning_rate": 0.01, "warmup_steps": 2, "logging_steps": 1, "disable_tqdm": True}
    return [*data, *(f"--{name}={value}" for name, value in {**options, "output_dir": output_dir}.items())]


@pytest.fixture(autouse=True)
def no_strangers(monkeypatch):
    """Their processes take seconds each, and are tested with `training.publish`."""
    monkeypatch.setattr(publish, "verify_as_a_stranger", lambda *_: None)


@pytest.fixture(autouse=True)
def plots(monkeypatch):
    """The runs that asked for curves.png. Drawing it takes longer than all the rest of a tiny run."""
    logs = []

    def record(log):
        logs.append(log)

    monkeypatch.setattr(RunLog, "plot", record)
    return logs


@pytest.fixture
def finetune(data, base, tmp_path, monkeypatch):
    """Returns a function that fine-tunes in this process, on one thread; flags come last and win."""
    monkeypatch.setattr(training.finetune, "cores_of_a_rank", lambda: 1)

    def run_main(*flags, folder="run"):
        AcceleratorState._reset_state(True)
        return main([*tiny_flags(data, base, tmp_path / folder), *map(str, flags)])

    run_main.folder = tmp_path / "run"
    yield run_main
    AcceleratorState._reset_state(True)


def read(folder, name):
    return json.loads((folder / name).read_text())


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def metrics(folder):
    """The lines of metrics.jsonl without the time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "minutes"} for row in rows]


def assert_same_run(folder, other):
    assert metrics(folder) == metrics(other)
    for name in ("best", newest_checkpoint(folder).name):
        files = [path.name for path in (folder / name).glob("*.safetensors")]
        assert files
        for file in files:
            tensors, others = load_file(folder / name / file), load_file(other / name / file)
            assert all(torch.equal(tensor, others[key]) for key, tensor in tensors.items()), name


def interrupt_at(monkeypatch, update):
    """Make the next run stop like a killed one, in the middle of an update."""
    original = FineTuningTrainer.training_step

    def dying(self, *arguments, **options):
        if self.state.global_step + 1 == update:
            raise KeyboardInterrupt
        return original(self, *arguments, **options)

    monkeypatch.setattr(FineTuningTrainer, "training_step", dying)


# A whole run -------------------------------------------------------------------------------------------------------


def test_a_run_writes_a_model_that_the_auto_classes_load_with_its_scores_and_origin(finetune, base, plots):
    assert finetune("--seed", 7) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(finetune.folder / "best")
    assert model.config.use_cache
    assert model.config.dropout == 0.1
    tokenizer = AutoTokenizer.from_pretrained(finetune.folder / "best")
    assert tokenizer("die katze")["input_ids"] == AutoTokenizer.from_pretrained(base)("die katze")["input_ids"]
    before, after = weights_of(base), weights_of(finetune.folder / "best")
    assert all(not torch.equal(tensor, after[name]) for name, tensor in before.items())

    record = read(finetune.folder, "run.json")
    assert record["arguments"]["seed"] == 7
    assert record["arguments"]["model"] == str(base)
    assert record["sessions"][0]["versions"]["torch"] == torch.__version__
    assert record["resolved"]["model"]["d_model"] == 16
    results = read(finetune.folder, "results.json")
    assert results["updates"] == 6
    assert results["stopped"] == "max_steps (6) reached"
    assert results["parameters"] == results["trained_parameters"] == model.num_parameters()
    assert results["validation"]["bleu_signature"].startswith("nrefs:1")
    assert results["validation"]["chrf_signature"].startswith("nrefs:1")
    assert [log.run for log in plots] == 3 * [finetune.folder]  # at each evaluation


def test_fine_tuning_learns(finetune):
    finetune("--max_steps", 60, "--eval_steps", 30, "--save_steps", 30, "--label_smoothing_factor", 0)
    losses = [row["train_loss"] for row in metrics(finetune.folder) if "train_loss" in row]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(("metric", "values", "best"), [("loss", [3.0, 2.0, 4.0], 4), ("chrf", [3.0, 2.0, 1.0], 2)])
def test_the_best_model_has_the_lowest_loss_or_the_highest_score(finetune, monkeypatch, metric, values, best):
    scripted, evaluation_loop = iter(values), FineTuningTrainer.evaluation_loop

    def score(*arguments, **options):
        output = evaluation_loop(*arguments, **options)
        output.metrics[f"eval_{metric}"] = next(scripted)
        return output

    monkeypatch.setattr(FineTuningTrainer, "evaluation_loop", score)
    finetune("--metric_for_best_model", metric, "--save_total_limit", 9)
    assert read(finetune.folder, "results.json")["best"] == {"update": best, metric: values[best // 2 - 1]}
    kept, saved, last = (weights_of(finetune.folder / name) for name in (f"checkpoint-{best}", "best", "checkpoint-6"))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in kept.items())
    assert not all(torch.equal(tensor, saved[name]) for name, tensor in last.items())


def test_target_tokens_of_an_epoch_are_counted_once(finetune, data, base):
    finetune("--max_steps", -1, "--num_train_epochs", 1, "--gradient_accumulation_steps", 2)
    with open(data[data.index("--train_target") + 1]) as file:
        lines = AutoTokenizer.from_pretrained(base)(file.read().splitlines())["input_ids"]
    results = read(finetune.folder, "results.json")
    assert results["target_tokens"] == sum(map(len, lines))
    assert results["stopped"] == "num_train_epochs (1.0) reached"
    assert results["updates"] == 3


def test_bf16_computes_in_bf16_and_keeps_the_weights_in_fp32(finetune):
    finetune()
    finetune("--bf16", folder="bf16")
    fp32, bf16 = ([row["train_loss"] for row in metrics(path) if "train_loss" in row] for path in folders(finetune))
    assert fp32 != bf16
    assert fp32 == pytest.approx(bf16, rel=0.05)
    assert {tensor.dtype for tensor in weights_of(finetune.folder.parent / "bf16" / "best").values()} == {torch.float32}


def folders(finetune):
    return finetune.folder, finetune.folder.parent / "bf16"


def test_a_checkpoint_in_bf16_is_trained_in_fp32(finetune, base, tmp_path):
    shutil.copytree(base, tmp_path / "half")
    AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    finetune("--model", tmp_path / "half", "--max_steps", 1)
    assert {tensor.dtype for tensor in weights_of(finetune.folder / "best").values()} == {torch.float32}


def test_from_scratch_takes_sizes_and_tokenizer_and_no_weights(finetune, base):
    finetune("--from_scratch", "--learning_rate", 1e-12, "--max_steps", 1)
    before, after = weights_of(base), weights_of(finetune.folder / "best")
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    assert 0.27 < before["model.shared.weight"].std() < 0.33
    assert 0.015 < after["model.shared.weight"].std() < 0.025
    assert read(finetune.folder / "best", "generation_config.json")["num_beams"] == 3


def test_without_validation_the_last_model_is_kept(finetune, data, base, tmp_path):
    AcceleratorState._reset_state(True)
    assert main([*tiny_flags(data[:4], base, tmp_path / "run"), "--max_steps", "3"]) == 0
    kept, saved = weights_of(tmp_path / "run" / "checkpoint-3"), weights_of(tmp_path / "run" / "best")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in kept.items())


@pytest.mark.slow
def test_an_evaluation_needs_no_network_and_no_cache(base, data, tmp_path):
    """In a process of its own, without any setting that would keep libraries off the network."""
    program = f"""
import socket

def refuse(*arguments, **options):
    raise AssertionError("the network was used")

socket.create_connection = socket.getaddrinfo = socket.socket.connect = refuse
from training.finetune import main

raise SystemExit(main({[*tiny_flags(data, base, tmp_path / "run"), "--max_steps", "2"]!r}))
"""
    names = ("HF_HOME", "HF_HUB_OFFLINE", "HF_EVALUATE_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"HF_HOME": str(tmp_path / "empty"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], cwd=CLONE, env=environment, check=True)
    assert {"bleu", "chrf"} < read(tmp_path / "run", "results.json")["validation"].keys()


# The update --------------------------------------------------------------------------------------------------------


def rows_of_updates():
    """Eight sentences of uneven length."""
    generator = torch.Generator().manual_seed(3)
    return Dataset.from_list(
        [
            {
                "input_ids": torch.randint(3, 20, (source,), generator=generator).tolist(),
                "labels": torch.randint(3, 20, (target,), generator=generator).tolist(),
            }
            for source, target in LENGTHS
        ]
    )


def train_one_update(kind, tokenizer, tmp_path, batch_size, accumulation):
    """One step of SGD with Hugging Face's Trainer or with ours."""
    AcceleratorState._reset_state(True)
    model = tiny_model()
    arguments = TrainerArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        optim="sgd",
        learning_rate=0.5,
        warmup_steps=0,
        max_grad_norm=0,
        label_smoothing_factor=0.1,
        eval_strategy="no",
        load_best_model_at_end=False,
        disable_tqdm=True,
    )
    collators = {FineTuningTrainer: PairCollator(1), Seq2SeqTrainer: DataCollatorForSeq2Seq(tokenizer, model=model)}
    trainer = kind(model=model, args=arguments, train_dataset=rows_of_updates(), data_collator=collators[kind])
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("kind", [Seq2SeqTrainer, FineTuningTrainer])
def test_an_update_is_that_of_the_closed_formula_however_it_is_split(kind, tokenizer, tmp_path):
    model = tiny_model().train()
    batch = PairCollator(1)(list(rows_of_updates()))
    log_probs = model(**batch, return_logits=True).logits.log_softmax(-1)[batch["labels"] != -100]
    right = log_probs.gather(1, batch["labels"][batch["labels"] != -100, None])
    (-(0.9 * right.sum() + 0.1 * log_probs.mean(-1).sum()) / sum(target for _, target in LENGTHS)).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert not torch.allclose(expected, torch.cat([p.detach().flatten() for p in tiny_model().parameters()]), atol=1e-3)
    for batch_size, accumulation in ((8, 1), (1, 8), (3, 3)):
        weights = train_one_update(kind, tokenizer, tmp_path, batch_size, accumulation)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6, msg=f"batches of {batch_size}")


# Evaluation --------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(base, tokenizer, tmp_path):
    """Returns a function that makes a Trainer of the checkpoint; batches of evaluation have three rows."""

    def make(kind=FineTuningTrainer, decoding=None, **options):
        AcceleratorState._reset_state(True)
        model = AutoModelForSeq2SeqLM.from_pretrained(base)
        if decoding is not None:
            model.generation_config = decoding
        return kind(
            model=model,
            args=TrainerArguments(
                output_dir=str(tmp_path),
                per_device_eval_batch_size=3,
                disable_tqdm=True,
                train_sampling_strategy="group_by_length" if kind is FineTuningTrainer else "random",
            ),
            data_collator=PairCollator(1),
            processing_class=tokenizer,
            eval_dataset=pairs(tokenizer)[1],
            compute_metrics=make_compute_metrics(tokenizer, TranslationMetric()),
            **options,
        )

    yield make
    AcceleratorState._reset_state(True)


def pairs(tokenizer):
    """Seven sources of one to seven words and their targets, as text and as ids."""
    sources = [" ".join(WORDS[row : 2 * row + 1]) for row in range(6)] + ["hund " * 7]
    targets = [" ".join(reversed(source.split())) for source in sources]
    columns = {"input_ids": tokenizer(sources)["input_ids"], "labels": tokenizer(targets)["input_ids"]}
    return (sources, targets), Dataset.from_dict(columns)


@pytest.mark.parametrize("changes", [{}, {"num_beams": 1, "length_penalty": None}, {"max_length_b": 5}])
def test_evaluation_decodes_by_the_generation_config_of_the_model_as_translate_does(trainer, tokenizer, changes):
    (sources, _), dataset = pairs(tokenizer)
    results = {}
    for name, config in (("changed", generation_config(**changes)), ("other", generation_config(num_beams=2))):
        ours = trainer(decoding=config)
        ids = np.where(ours.predict(dataset).predictions == -100, 1, ours.predict(dataset).predictions)
        results[name] = tokenizer.batch_decode(ids, skip_special_tokens=True)
        assert ours.model.generation_config.to_diff_dict() == config.to_diff_dict()  # and is left alone
        one_by_one = [translate_all(ours.model, tokenizer, [text], ours.model.search_options())[0] for text in sources]
        assert results[name] == one_by_one
    assert results["changed"] != results["other"]


def test_hugging_faces_own_trainer_decodes_by_the_generation_config_too(trainer, tokenizer):
    _, dataset = pairs(tokenizer)
    settings = {"num_beams": 3, "length_penalty": 2.0, "max_new_tokens": 9}
    plain = trainer(Seq2SeqTrainer, decoding=generation_config(**settings))
    batch = PairCollator(1)(list(dataset))
    got = torch.tensor(plain.predict(dataset).predictions)
    fresh = trainer(Seq2SeqTrainer, decoding=generation_config(num_beams=1, length_penalty=None)).model
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = fresh.generate(**source, **settings)
    greedy = fresh.generate(**source, max_new_tokens=9)
    assert got[:, : expected.shape[1]].where(got[:, : expected.shape[1]] != -100, 1).tolist() == expected.tolist()
    assert expected.tolist() != greedy.tolist()


def test_flags_may_ask_for_other_beams_while_training(trainer, tokenizer):
    (sources, _), dataset = pairs(tokenizer)
    ours = trainer()
    greedy = translate_all(ours.model, tokenizer, sources, ours.model.search_options(num_beams=1))
    assert greedy != translate_all(ours.model, tokenizer, sources, ours.model.search_options())
    ours.args.generation_num_beams = 1
    ids = ours.predict(dataset).predictions
    assert tokenizer.batch_decode(np.where(ids == -100, 1, ids), skip_special_tokens=True) == greedy


def test_generation_settings_survive_fine_tuning(finetune, base):
    finetune()
    before = read(base, "generation_config.json")
    assert (before["num_beams"], before["length_penalty"], before["max_length_b"]) == (3, 2.0, 2)
    for name in ("best", "checkpoint-6"):
        assert read(finetune.folder / name, "generation_config.json") == before


def test_the_loss_of_an_evaluation_is_the_mean_over_all_target_tokens(trainer, tokenizer):
    _, dataset = pairs(tokenizer)
    ours = trainer()
    losses = []
    with torch.no_grad():
        for row in dataset:
            batch = PairCollator(1)([row])
            logits = ours.model.eval()(**batch).logits
            losses += functional.cross_entropy(logits[0], batch["labels"][0], reduction="none").tolist()
    assert ours.evaluate()["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    ours.args.predict_with_generate = False
    ours.compute_metrics = None
    assert ours.evaluate()["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_scores_while_training_are_those_of_the_results(finetune):
    """Two ways to one number: the Trainer's evaluation of the last update, and that of the saved model."""
    finetune("--max_steps", 2, "--metric_for_best_model", "loss", "--learning_rate", 1e-4)
    (row,) = [row for row in metrics(finetune.folder) if "validation_loss" in row]
    final = read(finetune.folder, "results.json")["validation"]
    for name in ("bleu", "chrf", "exact_match"):
        assert row[f"validation_{name}"] == final[name]
    assert final["chrf"] > 0
    assert row["validation_loss"] == pytest.approx(final["loss"], rel=1e-5)


def test_blank_and_over_long_rows_are_scored_alike_while_training_and_in_the_results(finetune, tmp_path):
    """Blank lines are translated by blank lines; the limits are those of training."""
    sources, targets = ["hund", "", " ", "der hund sieht " * 6], ["hund", "", "", "sieht hund der " * 6]
    flags = []
    for side, lines in (("source", sources), ("target", targets)):
        (tmp_path / side).write_text("".join(f"{line}\n" for line in lines))
        flags += [f"--validation_{side}", tmp_path / side]
    limits = ["--max_source_length", 9, "--max_target_length", 9]
    finetune(*flags, *limits, "--max_steps", 2, "--metric_for_best_model", "loss", "--generation_num_beams", 3)
    (row,) = [row for row in metrics(finetune.folder) if "validation_loss" in row]
    final = read(finetune.folder, "results.json")["validation"]
    assert [row[f"validation_{name}"] for name in ("bleu", "chrf")] == [final["bleu"], final["chrf"]]
    assert row["validation_exact_match"] == final["exact_match"] >= 50


def test_metrics_take_minus_100_for_padding_on_both_sides(tokenizer):
    texts, others = ["die katze liest das haus", "der baum sieht den hund"], ["die katze sieht das haus", "hund"]
    sides = []
    for lines, extra in ((texts, 3), (others, 5)):
        ids = tokenizer(lines)["input_ids"]
        width = max(map(len, ids)) + extra
        sides.append(np.array([[*row, *[-100] * (width - len(row))] for row in ids]))
    with pytest.raises(OverflowError):
        tokenizer.batch_decode(sides[0])
    scores = make_compute_metrics(tokenizer, TranslationMetric())(EvalPrediction(*sides))
    assert scores["bleu"] == sacrebleu.corpus_bleu(texts, [others]).score > 0
    assert scores["chrf"] == sacrebleu.corpus_chrf(texts, [others]).score
    assert scores["exact_match"] == 0
    equal = make_compute_metrics(tokenizer, TranslationMetric())(EvalPrediction(sides[0], sides[0]))
    assert equal == {"bleu": pytest.approx(100), "chrf": pytest.approx(100), "exact_match": 100}


# Interruptions -----------------------------------------------------------------------------------------------------


# An epoch has five updates of 12 rows.
@pytest.mark.parametrize(
    ("flags", "killed"),
    [
        pytest.param(["--max_steps", 9], 8, id="in the second epoch"),
        pytest.param(
            ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 3, "--logging_steps", 3],
            4,
            id="accumulation",
        ),
        pytest.param(
            ["--train_sampling_strategy", "random", "--max_steps", 9], 8, id="random order", marks=pytest.mark.slow
        ),
        pytest.param(
            ["--save_steps", 5, "--eval_steps", 5, "--max_steps", 8], 7, id="at an epoch's end", marks=pytest.mark.slow
        ),
        pytest.param(
            ["--save_strategy", "epoch", "--eval_strategy", "epoch", "--max_steps", 11],
            9,
            id="by epochs",
            marks=pytest.mark.slow,
        ),
        pytest.param(["--lora_rank", 2], 5, id="LoRA", marks=pytest.mark.slow),
        pytest.param(["--dataloader_num_workers", 2, "--max_steps", 9], 8, id="two workers", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_started_again_is_the_run_that_was_not(finetune, monkeypatch, flags, killed):
    finetune(*flags, folder="whole")
    with monkeypatch.context() as patch:
        interrupt_at(patch, killed)
        with pytest.raises(KeyboardInterrupt):
            finetune(*flags)
    assert newest_checkpoint(finetune.folder) is not None
    assert not (finetune.folder / "results.json").exists()
    finetune(*flags)
    assert_same_run(finetune.folder, finetune.folder.parent / "whole")
    sessions = read(finetune.folder, "run.json")["sessions"]
    assert [session["from_update"] > 0 for session in sessions] == [False, True]


def test_the_order_of_an_epoch_follows_from_seed_and_epoch_alone(trainer, tokenizer):
    def order(seed, epoch, *, by_length=True):
        torch.rand(1)
        lengths = [3 + row % 7 for row in range(50)]
        return list(SeededSampler(lengths, group_size=6, by_length=by_length, seed=seed, epoch=lambda: epoch))

    for by_length in (True, False):
        first = order(1, 0, by_length=by_length)
        assert first == order(1, 0, by_length=by_length)
        assert sorted(first) == list(range(50))
        assert first != order(1, 1, by_length=by_length)
        assert first != order(2, 0, by_length=by_length)

    trainer = trainer(train_dataset=pairs(tokenizer)[1])
    trainer._train_batch_size = trainer.args.per_device_train_batch_size = 1  # rows of one group stand by length
    orders = {}
    for epoch in (0.0, 1.0, 1.4):
        trainer.state.epoch = epoch
        orders[epoch] = list(trainer._get_train_sampler())
    assert orders[0.0] != orders[1.0] == orders[1.4]

    def spread(rows):
        return sum(max(row % 7 for row in rows[i : i + 6]) - min(row % 7 for row in rows[i : i + 6]) for i in (6, 24))

    assert spread(order(1, 0)) < spread(order(1, 0, by_length=False))


def test_a_run_moved_after_its_last_update_is_finished_in_its_new_place(finetune, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training.finetune, "save_model_folder", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finetune("--seed", 1)
    moved = finetune.folder.parent / "moved"
    finetune.folder.rename(moved)
    finetune("--seed", 2)  # another run where the first was
    assert finetune("--seed", 1, folder="moved") == 0
    best = read(moved, "results.json")["best"]["update"]
    assert weights_digest(moved / "best") == weights_digest(moved / f"checkpoint-{best}")
    assert weights_digest(moved / "best") != weights_digest(finetune.folder / "best")


def test_a_continued_run_must_read_what_it_began_with(finetune, monkeypatch, data, base, tmp_path, capsys):
    copied = shutil.copytree(base, tmp_path / "base")
    flags = ["--model", copied, "--lora_rank", 2]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            finetune(*flags)
    tiny_model(seed=5, vocab_size=280, bos_token_id=0, decoder_start_token_id=0).save_pretrained(copied)
    assert finetune(*flags) == 1
    assert "what it reads has changed: model. Use another output_dir" in capsys.readouterr().err
    shutil.copytree(base, copied, dirs_exist_ok=True)
    file = tmp_path / "other.de"
    with open(data[data.index("--train_target") + 1]) as lines:
        file.write_text("".join(sorted(lines)))
    monkeypatch.setattr(training.finetune, "load_pairs", lambda arguments: load_pairs(replaced(arguments, file)))
    assert finetune(*flags) == 1
    assert "what it reads has changed: train data." in capsys.readouterr().err


def replaced(arguments, file):
    """The same names of files, another content."""
    return dataclasses.replace(arguments, train_target=str(file))


def test_checkpoints_that_are_not_the_runs_own_are_left_alone(finetune, base, capsys):
    for name, content in (("checkpoint-7", None), ("checkpoint-9", "{}")):
        shutil.copytree(base, finetune.folder / name)
        if content:
            (finetune.folder / name / "trainer_state.json").write_text(content)
    assert finetune("--model", finetune.folder / "checkpoint-7") == 1
    assert "checkpoint-7 is not of a run of this program, for there is no run.json" in capsys.readouterr().err
    assert sorted(path.name for path in finetune.folder.iterdir()) == ["checkpoint-7", "checkpoint-9"]


def test_a_refused_command_leaves_half_written_checkpoints_where_they_are(finetune, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            finetune()
    shutil.copytree(finetune.folder / "checkpoint-4", finetune.folder / "checkpoint-6")
    (finetune.folder / "checkpoint-6" / "trainer_state.json").unlink()
    assert finetune("--learning_rate", 0.5) == 1
    assert (finetune.folder / "checkpoint-6" / "model.safetensors").exists()


def test_a_line_of_metrics_that_was_not_written_to_its_end_is_dropped(finetune, monkeypatch):
    finetune(folder="whole")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            finetune()
    with (finetune.folder / "metrics.jsonl").open("a") as file:
        file.write('{"update": 5, "ep')
    assert finetune() == 0
    assert_same_run(finetune.folder, finetune.folder.parent / "whole")


def test_an_evaluation_at_the_start_is_made_once(finetune, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            finetune("--eval_on_start")
    finetune("--eval_on_start")
    evaluated = [row["update"] for row in metrics(finetune.folder) if "validation_bleu" in row]
    assert evaluated == [0, 2, 4, 6]


def test_a_loss_that_is_no_number_ends_the_run_with_an_error(finetune, capsys):
    flags = ["--optim", "sgd", "--learning_rate", 1e30, "--max_grad_norm", 0, "--warmup_steps", 0]
    assert finetune(*flags) == 1
    assert "error: the loss is no longer a number (update " in capsys.readouterr().err
    assert not (finetune.folder / "results.json").exists()


@pytest.mark.parametrize("content", [pytest.param(None, marks=pytest.mark.slow), "{"])
def test_a_half_written_checkpoint_is_not_continued_from(finetune, monkeypatch, content):
    finetune(folder="whole")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            finetune()
    state = finetune.folder / "checkpoint-4" / "trainer_state.json"
    state.unlink()
    if content:
        state.write_text(content)
    finetune()
    assert_same_run(finetune.folder, finetune.folder.parent / "whole")
    assert read(finetune.folder, "run.json")["sessions"][1]["from_update"] == 2


def test_a_finished_run_is_left_alone_and_other_arguments_are_refused(finetune, capsys):
    finetune()
    before = {path: path.stat().st_mtime_ns for path in finetune.folder.rglob("*")}
    assert finetune() == 0
    assert finetune("--max_steps", 8, "--lora_rank", 2) == 1
    error = capsys.readouterr().err
    assert "lora_rank was 0, is 2" in error
    assert "max_steps was 6, is 8" in error
    assert "allow_changes" not in error
    assert {path: path.stat().st_mtime_ns for path in finetune.folder.rglob("*")} == before
    assert finetune("--model", finetune.folder / "best", "--max_steps", 3, folder="further") == 0


HOLD = """
import sys
from pathlib import Path
from unittest import mock
from training.run_log import RunLog

log = RunLog(Path(sys.argv[1]), mock.Mock(is_main_process=True))
log.claim()
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_run_that_another_process_trains_is_left_alone(finetune, capsys):
    finetune.folder.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, finetune.folder], cwd=CLONE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"claimed\n"
        assert finetune() == 1
        assert f"another session trains in {finetune.folder}" in capsys.readouterr().err
        assert [path.name for path in finetune.folder.iterdir()] == [".lock"]
    finally:
        holder.communicate()
    assert finetune("--max_steps", 1) == 0


def test_ranks_on_a_cpu_share_its_cores(finetune, monkeypatch):
    """Torchrun leaves each of them one thread."""
    asked = mock.Mock()
    monkeypatch.setattr(torch, "set_num_threads", asked)
    monkeypatch.setattr(training.finetune, "cores_of_a_rank", training.launching.cores_of_a_rank)
    monkeypatch.setattr(training.launching.os, "sched_getaffinity", lambda _: set(range(6)))
    assert finetune("--max_steps", 1) == 0
    asked.assert_called_once_with(6)


STILL = ["--learning_rate", 1e-12, "--metric_for_best_model", "exact_match", "--early_stopping_patience", 2]


def test_training_stops_when_patience_is_at_an_end_also_in_a_continued_run(finetune, monkeypatch):
    flags = [*STILL, "--max_steps", 20]
    finetune(*flags, folder="whole")
    results = read(finetune.folder.parent / "whole", "results.json")
    assert results["stopped"] == "2 evaluations without a better exact_match"
    assert results["updates"] == 6
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            finetune(*flags)
    finetune(*flags)
    assert_same_run(finetune.folder, finetune.folder.parent / "whole")


@pytest.mark.parametrize("flags", [["--max_steps", 3], [*STILL, "--max_steps", 20]], ids=["at max_steps", "early"])
def test_a_run_interrupted_after_its_last_update_is_not_trained_further(finetune, monkeypatch, flags):
    finetune(*flags, folder="whole")
    with monkeypatch.context() as patch:
        patch.setattr(training.finetune, "save_model_folder", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finetune(*flags)
    finetune(*flags)
    assert_same_run(finetune.folder, finetune.folder.parent / "whole")
    once, again = (read(path, "results.json") for path in (finetune.folder.parent / "whole", finetune.folder))
    for name in ("updates", "stopped", "target_tokens", "best", "validation", "epochs"):
        assert once[name] == again[name]


# Adapters ----------------------------------------------------------------------------------------------------------


def test_lora_trains_adapters_alone_and_leaves_them_and_a_merged_model(finetune, base):
    finetune("--lora_rank", 8, "--metric_for_best_model", "loss")
    results = read(finetune.folder, "results.json")
    adapted = 2 * 2 + 2 * 2 * 2  # q_proj and v_proj of two encoder layers, and twice those of two decoder layers
    assert results["trained_parameters"] == adapted * 8 * (16 + 16)
    before, merged = weights_of(base), weights_of(finetune.folder / "best")
    assert before.keys() == merged.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, merged[name])}
    assert len(changed) == adapted
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in changed)

    best = AutoModelForSeq2SeqLM.from_pretrained(finetune.folder / "best").eval()
    assert results["parameters"] == best.num_parameters() == sum(tensor.numel() for tensor in before.values())
    adapter = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(base), finetune.folder / "adapter").eval()
    batch = PairCollator(1)(list(rows_of_updates()))
    torch.testing.assert_close(adapter(**batch).logits, best(**batch).logits, rtol=1e-4, atol=1e-4)
    assert read(finetune.folder / "best", "generation_config.json") == read(base, "generation_config.json")


# Several ranks, and the Hub ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one_and_score_every_row_once(finetune, data, base, tmp_path):
    flags = ["--dropout", 0, "--optim", "sgd", "--max_steps", 4, "--max_grad_norm", 0, "--learning_rate", 0.1]
    flags = [*flags, "--per_device_eval_batch_size", 2, "--metric_for_best_model", "loss"]
    finetune(*flags)
    command = [*TWO_RANKS, "training.finetune", *tiny_flags(data, base, tmp_path / "two"), *flags]
    run([*command, "--per_device_train_batch_size", 6])
    assert read(tmp_path / "two", "run.json")["sessions"][0]["num_processes"] == 2
    one, two = (weights_of(path / "best") for path in (finetune.folder, tmp_path / "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5)
    for row, other in zip(metrics(finetune.folder), metrics(tmp_path / "two"), strict=True):
        assert row == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_two_ranks_interrupted_and_started_again_are_the_run_that_was_not(data, base, tmp_path):
    command = [*TWO_RANKS, "training.finetune"]
    size = ["--per_device_train_batch_size", 6, "--save_total_limit", 9]
    run([*command, *tiny_flags(data, base, tmp_path / "whole"), *size, "--max_steps", 9])
    run([*command, *tiny_flags(data, base, tmp_path / "parts"), *size, "--max_steps", 9])
    for update in (8, 9):  # as if killed in the middle of the second epoch
        shutil.rmtree(tmp_path / "parts" / f"checkpoint-{update}", ignore_errors=True)
    assert newest_checkpoint(tmp_path / "parts").name == "checkpoint-6"
    (tmp_path / "parts" / "results.json").unlink()
    run([*command, *tiny_flags(data, base, tmp_path / "parts"), *size, "--max_steps", 9])
    assert read(tmp_path / "parts", "run.json")["sessions"][1]["from_update"] == 6
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_the_best_model_is_published_at_the_end_if_asked(finetune, monkeypatch, tmp_path):
    with Hub() as hub:
        hub.connect(monkeypatch, tmp_path / "cache", WRITER)
        assert finetune(*PUSH, *CARD, "--max_steps", 2, "--hub_private_repo", "true") == 0
        pushed = hub.files("tester/tuned")
        assert HfApi().model_info("tester/tuned").private
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert pushed[name] == (finetune.folder / "best" / name).read_bytes()
    assert "model.safetensors" in pushed
    assert "Translates English to German" in pushed["README.md"].decode()
    assert not any("checkpoint" in name or "training_args" in name or name == "run.json" for name in pushed)


def test_a_push_that_broke_off_is_made_by_the_same_command_without_training(finetune, monkeypatch, tmp_path, capsys):
    flags = [*PUSH, *CARD, "--max_steps", 2]

    def cut(*_, **__):
        raise ConnectionError("the line is cut")

    with Hub() as hub:
        hub.connect(monkeypatch, tmp_path / "cache", WRITER)
        with monkeypatch.context() as patch:
            patch.setattr(HfApi, "create_commit", cut)
            assert finetune(*flags) == 1
        assert "error: the line is cut" in capsys.readouterr().err
        interrupt_at(monkeypatch, 1)  # an update would raise
        assert finetune(*flags) == 0
        assert "model.safetensors" in hub.files("tester/tuned")


@pytest.mark.parametrize(
    ("token", "flags", "message"),
    [
        ("hf_unknown", [], "the Hub does not know this token: look at HF_TOKEN"),
        (WRITER, ["--hub_revision", "v7"], "tester/tuned has no revision v7"),
        (None, [], "the Hub at http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_training(
    finetune, monkeypatch, tmp_path, capsys, token, flags, message
):
    with Hub() as hub:
        hub.connect(monkeypatch, tmp_path / "cache", token or WRITER)
        HfApi().create_repo("tester/tuned", token=WRITER)
        if token is None:
            hub.url = "http://127.0.0.1:9"
            hub.connect(monkeypatch, tmp_path / "cache", WRITER)
        assert finetune(*PUSH, *CARD, *flags) == 1
    error = capsys.readouterr().err.partition("error: ")[2]
    assert message in error
    assert "hf_unknown" not in error
    assert not list(finetune.folder.glob("checkpoint-*"))


def test_nothing_is_made_on_the_hub_before_there_is_a_model(finetune, monkeypatch, tmp_path):
    with Hub() as hub:
        hub.connect(monkeypatch, tmp_path / "cache", WRITER)
        interrupt_at(monkeypatch, 1)
        with pytest.raises(KeyboardInterrupt):
            finetune(*PUSH, *CARD)
        assert hub.repos == {}


# The card ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [[], ["--lora_rank", 4, "--metric_for_best_model", "loss"]], ids=["all", "LoRA"])
def test_the_card_of_a_fine_tuned_model_says_what_it_was_and_how_it_was_trained(finetune, base, monkeypatch, lora):
    finetune(*lora, "--max_steps", 2)
    flags = ["--license", "mit", "--language", "en", "de", "--datasets", "tester/words", "--commit", "c0ffee"]
    options = publish.parse_arguments(["--model", str(finetune.folder), "--repo", "tester/tuned", *flags])
    card = render_card(read_run(finetune.folder), options)
    text = " ".join(card.text.split())
    assert "fine-tuned with hf_vanilla_trm from a local model" in text
    assert "Hugging Face's Trainer" in text
    assert card.data.base_model is None
    assert str(base) not in str(card)
    for name, value in (("per_device_train_batch_size", 12), ("label_smoothing_factor", 0.1), ("optim", "adamw_torch")):
        assert f"| {name} | {value}" in card.text
    assert "decoded with 3 beams and the paper's length penalty of alpha 2.0" in text
    assert ("(LoRA of rank 4 on the query and value projections" in text) == bool(lora)
    assert ("| lora_alpha | 8.0 |" in card.text) == bool(lora)

    options.base_model = "tester/base"
    card = render_card(read_run(finetune.folder), options)
    assert card.data.base_model == "tester/base"
    assert "from [tester/base](https://huggingface.co/tester/base)" in " ".join(card.text.split())


def test_the_card_of_a_model_from_scratch_does_not_call_it_fine_tuned(finetune):
    finetune("--from_scratch", "--max_steps", 1)
    flags = ["--license", "mit", "--language", "en", "de", "--datasets", "tester/words", "--commit", "c0ffee"]
    options = publish.parse_arguments(["--model", str(finetune.folder), "--repo", "tester/tuned", *flags])
    text = render_card(read_run(finetune.folder), options).text
    assert "trained from scratch with hf_vanilla_trm" in " ".join(text.split())
    assert "fine-tuned" not in text


# What is refused ---------------------------------------------------------------------------------------------------


def test_a_push_without_scores_for_its_card_is_refused_before_training(data, base, tmp_path, capsys):
    AcceleratorState._reset_state(True)
    assert main([*tiny_flags(data[:4], base, tmp_path / "run"), *PUSH, *CARD]) == 1
    assert "push_to_hub needs validation or test data" in capsys.readouterr().err


def test_adapters_are_not_taken_for_a_model(finetune, capsys):
    finetune("--lora_rank", 2, "--max_steps", 2)
    assert finetune("--model", finetune.folder / "adapter", folder="further") == 1
    assert "holds adapters, not a model: give the merged one, best/ of its run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "missing/folder"], "missing/folder"),
        (["--validation_source", "missing", "--validation_target", "missing"], "missing: there is no such file"),
        (["--bleu_tokenize", "nonsense"], "bleu_tokenize ('nonsense')"),
        (["--early_stopping_patience", 2, "--eval_strategy", "no"],
         "early_stopping_patience (2) needs validation"),
        ([*PUSH, "--license", "mit", "--datasets", "words"], "push_to_hub needs language for the model's card"),
        ([*PUSH, "--language", "en de"], "push_to_hub needs license, datasets for the model's card"),
        ([*PUSH, *CARD, "--num_samples", 0], "push_to_hub needs num_samples above 0"),
        ([*PUSH, *CARD], "there is no token: set HF_TOKEN, or run `hf auth login`"),
    ],
)  # fmt: skip
def test_what_the_user_got_wrong_is_one_line_and_not_a_traceback(finetune, capsys, flags, message):
    assert finetune(*flags) == 1
    error = capsys.readouterr().err
    assert f"error: {error.partition('error: ')[2]}" in error
    assert message in error.partition("error: ")[2]
    assert "Traceback" not in error
    assert not list(finetune.folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--metric_for_best_model", "rouge"], "metric_for_best_model (rouge) must be one of bleu, chrf"),
        (["--no_predict_with_generate"], "metric_for_best_model (bleu) must be one of loss, for nothing is decoded"),
        (["--save_strategy", "no", "--eval_strategy", "no"], "save_strategy (no)"),
        (
            ["--save_steps", 4],
            "save_strategy (steps) and save_steps (4) must equal eval_strategy (steps) and eval_steps (2)",
        ),
        (["--no_load_best_model_at_end"], "load_best_model_at_end (False): the best model is kept"),
        (["--greater_is_better", "true"], "greater_is_better cannot be given"),
        (["--learning_rate", -1], "learning_rate (-1.0) must be positive"),
        (["--max_steps", -1, "--num_train_epochs", 0], "num_train_epochs (0.0) must be positive"),
        (["--fsdp", "full_shard"], "fsdp cannot be given: here every process has the whole model"),
        (["--save_only_model"], "save_only_model cannot be given: the run could not be continued exactly"),
        (["--ignore_data_skip"], "ignore_data_skip cannot be given"),
        (["--no_restore_callback_states_from_checkpoint"], "restore_callback_states_from_checkpoint cannot be given"),
        (["--auto_find_batch_size"], "auto_find_batch_size cannot be given"),
        (["--no_average_tokens_across_devices"], "average_tokens_across_devices cannot be given"),
        (["--dataloader_drop_last"], "dataloader_drop_last cannot be given"),
        (["--prediction_loss_only"], "prediction_loss_only cannot be given"),
        (["--no_eval_do_concat_batches"], "eval_do_concat_batches cannot be given"),
        (["--logging_nan_inf_filter"], "logging_nan_inf_filter cannot be given"),
        (["--resume_from_checkpoint", "x"], "resume_from_checkpoint cannot be given"),
        (["--push_to_hub_token", "hf_secret"], "--push_to_hub_token"),
        (["--push_to_hub"], "push_to_hub needs hub_model_id in the form USER/NAME; it is None"),
        (["--push_to_hub", "--hub_model_id", "tuned"], "in the form USER/NAME; it is tuned"),
        ([*PUSH, "--hub_strategy", "every_save"], "invalid choice"),
        (["--language", "en"], "language ('en') must be two codes"),
        (["--hub_token", "hf_secret"], "hub_token cannot be given: set HF_TOKEN"),
        (["--generation_max_length", 9], "generation_max_length cannot be given"),
        (["--lora_rank", 2, "--from_scratch"], "lora_rank (2) and from_scratch"),
        (["--lora_rank", -1], "lora_rank (-1) must not be negative"),
        (["--label_smoothing_factor", 1], "label_smoothing_factor (1.0) must be at least 0 and below 1"),
        (["--train_sampling_strategy", "batch_rebalance"], "invalid choice"),
        (["--learning-rat", 1], "--learning-rat"),
        (["--vocab_size", 300], "--vocab_size"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_read(finetune, capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        finetune(*flags)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "hf_secret" not in error
    assert not finetune.folder.exists()


def test_an_unknown_key_of_the_file_is_refused_and_a_flag_beats_the_file(finetune, capsys, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("learning_rate: 1e-3\nwarm_up_steps: 5\n")
    with pytest.raises(SystemExit):
        finetune("--config", file)
    assert "line 2: unknown argument 'warm_up_steps'; did you mean 'warmup_steps'?" in capsys.readouterr().err
    file.write_text("weight_decay: 1e-3\nbf16: no\nmax_steps: 99\nreport_to: none\n")
    finetune("--config", file)
    arguments = read(finetune.folder, "run.json")["arguments"]
    assert (arguments["weight_decay"], arguments["bf16"], arguments["max_steps"]) == (0.001, False, 6)


def test_a_model_of_another_kind_is_refused_by_its_name(finetune, base, tmp_path, capsys):
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "marian")
    MarianConfig(vocab_size=300).save_pretrained(tmp_path / "marian")
    assert finetune("--model", tmp_path / "marian") == 1
    assert "is a marian; only translation models of type vanilla_trm" in capsys.readouterr().err


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(finetune, base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "odd")
    train_tokenizer([" ".join(WORDS)] * 3, vocab_size=300).save_pretrained(tmp_path / "odd")
    assert finetune("--model", tmp_path / "odd") == 1
    assert "the tokenizer has ids up to 299, but the model's vocab_size is 280" in capsys.readouterr().err


def test_fewer_processes_than_the_launcher_was_asked_for_are_refused(finetune, monkeypatch, capsys):
    monkeypatch.setattr(training.launching, "processes_asked_for", lambda: 2)
    assert finetune() == 1
    assert "asked for 2 processes, but 1 would train together" in capsys.readouterr().err


def test_fsdp_that_accelerate_would_ignore_is_refused(finetune, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert finetune() == 1
    assert "the launcher was asked for FSDP, but accelerate runs NO" in capsys.readouterr().err


def test_one_process_that_would_split_batches_over_several_gpus_is_refused(finetune, monkeypatch, capsys):
    monkeypatch.setattr(TrainerArguments, "n_gpu", 3)
    assert finetune() == 1
    assert "one process sees 3 GPUs" in capsys.readouterr().err


def test_a_folder_of_another_program_is_not_written_to(finetune, capsys):
    (finetune.folder / "checkpoints").mkdir(parents=True)
    (finetune.folder / "run.json").write_text('{"arguments": {"d_model": 16}, "sessions": []}')
    assert finetune() == 1
    assert "was begun with other arguments: " in capsys.readouterr().err
    assert not (finetune.folder / "best").exists()


def test_arguments_may_change_until_there_is_something_to_continue_from(finetune, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            finetune()
    assert finetune("--max_steps", 2) == 0


def test_the_shipped_configuration_is_read():
    kinds = (FineTuningArguments, PairArguments, CardArguments, TrainerArguments)
    file = CLONE / "training" / "configs" / "finetune_en_zh.yaml"
    options, data, _, arguments = parse_dataclasses(kinds, ["--config", str(file)], description="")
    assert (data.embedded_corpus, options.bleu_tokenize) == ("en-zh", "zh")
    assert arguments.learning_rate > 0


@pytest.mark.slow
def test_the_command_runs(data, base, tmp_path):
    run([*PYTHON, "training.finetune", *tiny_flags(data, base, tmp_path), "--max_steps", 2])
    assert read(tmp_path, "results.json")["updates"] == 2
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
