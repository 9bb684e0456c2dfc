"""The training command, from text files to folders that the Auto classes load."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, DistributedType
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

import training.checkpoint
import training.evaluation
from tests.interruptions import Killed
from tests.launch import ACCELERATE, CLONE, PYTHON, TWO_RANKS, run
from tests.pairs import write_reversed_pairs
from training.checkpoint import find_checkpoints
from training.launching import check_fsdp, processes_asked_for
from training.loop import TrainingLoop
from training.train import main

WORDS = ["der", "die", "das", "hund", "katze", "haus", "baum", "liest", "sieht", "findet", "einen", "kleinen", "roten"]
D_MODEL, WARMUP = 16, 4
HALVES = slice(6), slice(6, 12)  # the updates of two epochs


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """60 and 11 sentences; the target is the source with its words reversed."""
    rows = {"train": 60, "validation": 11}
    files = write_reversed_pairs(tmp_path_factory.mktemp("data"), WORDS, rows, lengths=5)
    return [word for name, file in files.items() for word in (f"--{name}", str(file))]


@pytest.fixture
def train(data, tmp_path):
    """Returns a function that trains a tiny model in this process; flags come last and win."""

    def run_main(*flags, folder="run"):
        AcceleratorState._reset_state(True)
        return main([*tiny_flags(data, tmp_path / folder), *map(str, flags)])

    run_main.folder = tmp_path / "run"
    yield run_main
    AcceleratorState._reset_state(True)


def tiny_flags(data, output_dir):
    sizes = {"vocab_size": 280, "d_model": D_MODEL, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 2}
    recipe = {"dropout": 0.1, "warmup_steps": WARMUP, "batch_tokens": 150, "max_updates": 6, "logging_every": 1}
    evaluation = {"max_length_b": 2, "num_beams": 2, "num_attention_heads": 2, "report_to": "none"}
    options = sizes | recipe | evaluation | {"cpu_threads": 1, "output_dir": output_dir}
    return [*data, *(f"--{name}={value}" for name, value in options.items())]


def metrics(folder):
    """The lines of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name not in ("minutes", "target_tokens_per_second")}
        for row in rows
    ]


def column(folder, name):
    return {row["update"]: row[name] for row in metrics(folder) if name in row}


def assert_same_run(folder, other):
    assert metrics(folder) == metrics(other)
    weights, others = (load_file(path / "last" / "model.safetensors") for path in (folder, other))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


def interrupt_at(monkeypatch, update):
    """Make the next run stop like a killed one, in the middle of an update."""
    original = TrainingLoop._update

    def dying(self, batches):
        if self.progress.update + 1 == update:
            raise Killed
        original(self, batches)

    monkeypatch.setattr(TrainingLoop, "_update", dying)


def test_a_run_writes_models_that_the_auto_classes_load_and_says_where_they_come_from(train):
    assert train("--report_to", "tensorboard", "--seed", 7) == 0
    for name in ("best", "last", "checkpoints/update-6"):
        model = AutoModelForSeq2SeqLM.from_pretrained(train.folder / name)
        assert model.generation_config.num_beams == 2
        assert model.generation_config.max_length_b == 2
        tokenizer = AutoTokenizer.from_pretrained(train.folder / name)
        assert model.config.vocab_size == len(tokenizer)
        assert model.config.eos_token_id == tokenizer("der")["input_ids"][-1]

    record = json.loads((train.folder / "run.json").read_text())
    assert record["arguments"]["seed"] == 7
    assert record["arguments"]["adam_beta2"] == 0.98
    assert record["arguments"]["num_processes"] == 1
    (session,) = record["sessions"]
    assert session["versions"]["torch"] == torch.__version__
    assert session["from_update"] == 0
    assert session["hardware"]["torch_threads"] == 1

    results = json.loads((train.folder / "results.json").read_text())
    assert results["updates"] == 6
    assert results["stopped"] == "max_updates (6) reached"
    assert results["parameters"] == model.num_parameters()
    assert results["validation"]["bleu_signature"].startswith("nrefs:1")
    assert (train.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((train.folder / "tensorboard").glob("events.*"))


def test_what_a_run_writes_is_utf_8_whatever_the_locale(tmp_path):
    program = "import sys, pathlib, training.run_log; training.run_log.write_json(pathlib.Path(sys.argv[1]), chr(233))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, tmp_path / "a.json"], cwd=CLONE, env=os.environ | locale, check=True)
    assert (tmp_path / "a.json").read_bytes() == '"é"\n'.encode()


def test_the_origin_is_written_before_the_first_step(train, monkeypatch):
    interrupt_at(monkeypatch, 1)
    with pytest.raises(Killed):
        train()
    assert json.loads((train.folder / "run.json").read_text())["arguments"]["max_updates"] == 6


def test_the_learning_rate_is_the_papers_at_every_update(train):
    train("--gradient_accumulation_steps", 2, "--max_updates", 9)
    rates = column(train.folder, "learning_rate")
    assert list(rates) == list(range(1, 10))
    for step, rate in rates.items():
        assert rate == pytest.approx(D_MODEL**-0.5 * min(step**-0.5, step * WARMUP**-1.5), rel=1e-12)


def test_the_optimizer_gets_that_learning_rate_and_the_papers_constants(train, monkeypatch):
    seen, step = [], torch.optim.Adam.step

    def spy(self, *arguments, **options):
        seen.append((self.param_groups[0]["lr"], self.param_groups[0]["betas"], self.param_groups[0]["eps"]))
        return step(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    train("--max_updates", 3)
    assert [rate for rate, *_ in seen] == list(column(train.folder, "learning_rate").values())
    assert {rest for _, *rest in [(None, (betas, eps)) for _, betas, eps in seen] for rest in rest} == {
        ((0.9, 0.98), 1e-9)
    }


# An epoch has 6 batches of 150 tokens, or 4 of 300.
@pytest.mark.parametrize(
    "flags",
    [["--save_every", 3], ["--batch_tokens", 300], ["--save_every", 3, "--num_workers", 2]],
    ids=["in the middle of an epoch", "at the end of an epoch", "with two workers"],
)
def test_an_interrupted_run_started_again_is_the_run_that_was_not(train, monkeypatch, flags):
    train(*flags, folder="whole")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        with pytest.raises(Killed):
            train(*flags)
    assert not (train.folder / "results.json").exists()
    train(*flags)
    assert_same_run(train.folder, train.folder.parent / "whole")
    sessions = json.loads((train.folder / "run.json").read_text())["sessions"]
    assert [session["from_update"] > 0 for session in sessions] == [False, True]


def test_each_epoch_has_the_same_rows_in_an_order_of_its_own(train):
    still = ["--learning_rate", 1e-9, "--dropout", 0, "--max_updates", 12]
    train(*still)
    losses = list(column(train.folder, "train_loss").values())
    assert losses[:6] != pytest.approx(losses[6:], rel=1e-3)
    tokens = [0, *column(train.folder, "target_tokens").values()]
    counts = [after - before for before, after in itertools.pairwise(tokens)]
    assert sorted(counts[:6]) == sorted(counts[6:])
    sums = [sum(count * loss for count, loss in zip(counts[half], losses[half], strict=True)) for half in HALVES]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_dropout_differs_between_updates_and_seeds(train):
    """Otherwise equal losses after resuming would show nothing."""
    one_batch = ["--batch_tokens", 5000, "--learning_rate", 1e-9, "--max_updates", 3]
    train(*one_batch)
    train(*one_batch, "--seed", 5, folder="other")
    losses = list(column(train.folder, "train_loss").values())
    assert len(set(losses)) == 3
    assert losses[0] != column(train.folder.parent / "other", "train_loss")[1]


def test_a_finished_run_is_left_alone(train, caplog):
    train()
    before = {path: path.stat().st_mtime_ns for path in train.folder.rglob("*")}
    with caplog.at_level(logging.INFO, logger="training"):
        assert train() == 0
    assert "nothing to do" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in train.folder.rglob("*")} == before


def test_other_arguments_are_refused_by_name_unless_allowed(train, capsys):
    train()
    capsys.readouterr()
    assert train("--max_updates", 8, "--label_smoothing", 0.2) == 1
    assert "label_smoothing was 0.1, is 0.2; max_updates was 6, is 8" in capsys.readouterr().err
    train("--max_updates", 8, "--allow_changes")
    assert list(column(train.folder, "train_loss")) == list(range(1, 9))
    assert json.loads((train.folder / "results.json").read_text())["updates"] == 8


def test_a_run_begun_before_an_argument_existed_goes_on_with_its_default_alone(train, capsys):
    train()
    record = json.loads((train.folder / "run.json").read_text())
    del record["arguments"]["bpe_dropout"]
    (train.folder / "run.json").write_text(json.dumps(record))
    assert train() == 0
    capsys.readouterr()
    assert train("--bpe_dropout", 0.1) == 1
    assert "begun with other arguments: bpe_dropout was 0.0, is 0.1." in capsys.readouterr().err


def test_bpe_dropout_trains_and_is_continued_bit_for_bit(data, tmp_path, monkeypatch):
    """As without it: two epochs in one go, and interrupted in the second."""
    flags = ["--bpe_dropout", "0.2", "--save_every", "1"]
    assert main([*tiny_flags(data, tmp_path / "whole"), *flags]) == 0
    with monkeypatch.context() as patch:
        made = TrainingLoop._after_update

        def stopping(loop, bar):
            if loop.progress.update == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return made(loop, bar)

        patch.setattr(TrainingLoop, "_after_update", stopping)
        assert main([*tiny_flags(data, tmp_path / "parts"), *flags]) == 0
    assert [path.name for path in find_checkpoints(tmp_path / "parts")][-1] != "update-6"
    assert main([*tiny_flags(data, tmp_path / "parts"), *flags]) == 0
    whole, parts = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    losses = column(tmp_path / "whole", "train_loss")
    assert losses == column(tmp_path / "parts", "train_loss")
    assert main(tiny_flags(data, tmp_path / "without")) == 0
    assert losses != column(tmp_path / "without", "train_loss")


def test_old_checkpoints_go_but_never_the_best(train, monkeypatch):
    bleu = iter([1.0, 9.0, 3.0, 4.0, 5.0, 6.0])
    score = training.evaluation.Evaluator.during_training
    monkeypatch.setattr(
        training.evaluation.Evaluator, "during_training", lambda *arguments: score(*arguments) | {"bleu": next(bleu)}
    )
    train("--eval_every", 1, "--keep_checkpoints", 2)
    assert [path.name for path in find_checkpoints(train.folder)] == ["update-2", "update-5", "update-6"]
    best, kept, last = (
        load_file(train.folder / name / "model.safetensors") for name in ("best", "checkpoints/update-2", "last")
    )
    assert all(torch.equal(best[name], kept[name]) for name in kept)
    assert not all(torch.equal(best[name], last[name]) for name in last)


@pytest.mark.parametrize(("metric", "values", "best"), [("loss", [3.0, 2.0, 4.0], 2), ("chrf", [3.0, 2.0, 4.0], 3)])
def test_the_best_model_has_the_lowest_loss_or_the_highest_score(train, monkeypatch, metric, values, best):
    scores, score = iter(values), training.evaluation.Evaluator.during_training
    monkeypatch.setattr(
        training.evaluation.Evaluator, "during_training", lambda *arguments: score(*arguments) | {metric: next(scores)}
    )
    train("--eval_every", 2, "--metric_for_best_model", metric)
    results = json.loads((train.folder / "results.json").read_text())
    assert results["best"] == {"update": 2 * best, metric: values[best - 1]}


def test_training_stops_when_patience_is_at_an_end(train, monkeypatch):
    score = training.evaluation.Evaluator.during_training
    monkeypatch.setattr(
        training.evaluation.Evaluator, "during_training", lambda *arguments: score(*arguments) | {"bleu": 1.0}
    )
    train("--eval_every", 1, "--early_stopping_patience", 2, "--max_updates", 50)
    results = json.loads((train.folder / "results.json").read_text())
    assert results["updates"] == 3
    assert results["stopped"] == "2 evaluations without a better bleu"


def test_max_epochs_and_max_minutes_stop_too(train):
    train("--max_epochs", 1, "--max_updates", 10**6)
    epochs = column(train.folder, "epoch")
    assert list(epochs.values())[-1] == 1
    assert next(iter(epochs.values())) == pytest.approx(1 / len(epochs))
    train("--max_minutes", 1e-6, "--max_updates", 10**6, folder="timed")
    results = json.loads((train.folder.parent / "timed" / "results.json").read_text())
    assert results["updates"] == 1
    assert results["stopped"] == "max_minutes (1e-06) reached"


def test_every_target_token_of_an_epoch_is_trained_on_once(train, data):
    train("--max_epochs", 1, "--max_updates", 10**6, "--gradient_accumulation_steps", 3)
    tokenizer = AutoTokenizer.from_pretrained(train.folder / "last")
    with open(data[data.index("--train_target") + 1]) as file:
        expected = sum(len(tokenizer(line.rstrip("\n"))["input_ids"]) for line in file)
    assert list(column(train.folder, "target_tokens").values())[-1] == expected


def test_over_long_rows_are_dropped_from_training_and_kept_in_validation(train, caplog, monkeypatch):
    rows, evaluate_loss = [], training.evaluation.evaluate_loss

    def spy(model, batches, *others):
        rows.append(sum(len(batch["labels"]) for batch in batches))
        return evaluate_loss(model, batches, *others)

    monkeypatch.setattr(training.evaluation, "evaluate_loss", spy)
    with caplog.at_level(logging.INFO, logger="training"):
        train("--max_updates", 1, "--max_target_length", 12)
    (dropped,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("train: ")]
    assert "dropped 0 of 60" not in dropped
    assert rows == [11, 11]  # at the last update, and at the end


def test_a_failing_save_leaves_no_checkpoint_and_the_run_continues_from_the_one_before(train, monkeypatch, capsys):
    train("--save_every", 2, folder="whole")
    save = torch.save

    def full_disk(value, path):
        if "update-4" in str(path):
            raise OSError("no space left on device")
        save(value, path)

    with monkeypatch.context() as patch:
        patch.setattr(training.checkpoint.torch, "save", full_disk)
        assert train("--save_every", 2) == 1
    assert "update-4 cannot be written: no space left on device" in capsys.readouterr().err
    assert [path.name for path in find_checkpoints(train.folder)] == ["update-2"]
    train("--save_every", 2)
    assert_same_run(train.folder, train.folder.parent / "whole")


def test_a_checkpoint_holds_only_tensors_json_and_the_models_code(train):
    train()
    folder = find_checkpoints(train.folder)[-1]
    suffixes = {path.suffix for path in folder.iterdir()}
    assert suffixes == {".json", ".safetensors", ".pt", ".py"}
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert len(state["state"]) == len(list(AutoModelForSeq2SeqLM.from_pretrained(folder).parameters()))


def test_bf16_autocast_trains_and_saves_full_precision(train):
    still = ["--dropout", 0, "--learning_rate", 0.001]
    train(*still, folder="full")
    train(*still, "--mixed_precision", "bf16")
    weights = load_file(train.folder / "best" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    full, half = (column(path, "train_loss") for path in (train.folder.parent / "full", train.folder))
    assert half != full, "nothing ran in bf16"
    assert list(half.values()) == pytest.approx(list(full.values()), rel=0.02)


def test_any_metric_that_is_logged_can_choose_the_best_model(train, tmp_path, capsys):
    script = tmp_path / "first_words.py"
    script.write_text(METRIC_SCRIPT)
    flags = ["--metrics", script, "--eval_every", 2]
    assert train(*flags, "--metric_for_best_model", "first_words") == 0
    scores = column(train.folder, "validation_first_words")
    assert list(scores) == [2, 4, 6]
    results = json.loads((train.folder / "results.json").read_text())
    assert results["best"]["first_words"] == max(scores.values())
    assert "first_words" in results["validation"]
    assert train(*flags, "--metric_for_best_model", "last_words", folder="other") == 1
    assert "metric_for_best_model (last_words) must be one of loss, perplexity, first_words" in capsys.readouterr().err
    assert train("--metrics", "no_such_metric", folder="other") == 1
    assert "the metric 'no_such_metric' cannot be loaded" in capsys.readouterr().err


METRIC_SCRIPT = """
import datasets
import evaluate

class FirstWords(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description="Share of equal first words.", citation="", features=features)

    def _compute(self, predictions, references):
        pairs = zip(predictions, references)
        equal = sum(prediction.split()[:1] == reference.split()[:1] for prediction, reference in pairs)
        return {"first_words": equal / len(references)}
"""


def test_further_validation_sets_are_scored_beside_the_first(train, data, tmp_path, capsys):
    (tmp_path / "news.tsv").write_text("source\ttarget\nder hund\thund der\n")
    files = [data[data.index(f"--train_{side}") + 1] for side in ("source", "target")]
    assert train("--further_validation", tmp_path / "news.tsv", ":".join(files), "--max_updates", 2) == 0
    results = json.loads((train.folder / "results.json").read_text())
    assert [results[name]["lines"] for name in ("validation", "validation_news", "validation_train")] == [11, 1, 60]
    assert list(column(train.folder, "validation_news_loss")) == [2]
    assert results["best"]["bleu"] == column(train.folder, "validation_bleu")[2]
    assert train("--further_validation", tmp_path / "news.tsv", tmp_path / "news.tsv", folder="other") == 1
    assert "two validation sets would be called validation_news" in capsys.readouterr().err


def test_the_moving_average_is_what_is_published(train):
    still = ["--learning_rate", 0.05, "--warmup_steps", 1, "--dropout", 0]
    train(*still, folder="plain")
    train(*still, "--ema_decay", 0.9)
    plain, averaged = (
        load_file(path / "last" / "model.safetensors") for path in (train.folder.parent / "plain", train.folder)
    )
    trained = load_file(train.folder / "checkpoints" / "update-6" / "model.safetensors")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in plain.items()), "training itself is the same"
    assert not any(torch.equal(tensor, averaged[name]) for name, tensor in plain.items())
    stored = load_file(train.folder / "checkpoints" / "update-6" / "average.safetensors")
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in stored.items() if name in averaged)


def test_a_streamed_run_trains_on_every_row_of_an_epoch(train, data):
    flags = ["--streaming", True, "--shuffle_buffer", 20, "--max_epochs", 2, "--max_updates", 10**6]
    limits = ["--max_source_length", 75, "--max_target_length", 75]
    assert train(*flags, *limits) == 0
    tokenizer = AutoTokenizer.from_pretrained(train.folder / "last")
    with open(data[data.index("--train_target") + 1]) as file:
        expected = sum(len(tokenizer(line.rstrip("\n"))["input_ids"]) for line in file)
    assert list(column(train.folder, "target_tokens").values())[-1] == 2 * expected
    assert list(column(train.folder, "epoch").values())[-1] == 2


def test_a_stream_with_rows_longer_than_a_batch_is_refused(train, capsys):
    assert train("--streaming", True) == 1
    assert "batch_tokens (150) must hold two of the longest rows that may come in a stream" in capsys.readouterr().err


def test_uneven_rows_are_dropped_from_training_alone(train, caplog):
    with caplog.at_level(logging.INFO, logger="training"):
        train("--max_updates", 1, "--max_length_ratio", 1.0)
    (dropped,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("train: ")]
    assert "too uneven" in dropped
    assert json.loads((train.folder / "results.json").read_text())["validation"]["lines"] == 11


def test_post_ln_without_warm_up_is_warned_about(train, caplog):
    with caplog.at_level(logging.WARNING, logger="training"):
        train("--warmup_steps", 0, "--learning_rate", 0.001, "--max_updates", 1)
        assert "post-LN Transformer rarely trains without warm-up" in caplog.text
        caplog.clear()
        train("--max_updates", 1, folder="warm")
        assert "warm-up" not in caplog.text


def test_training_without_validation_saves_the_last_model_as_best(train, data):
    AcceleratorState._reset_state(True)
    flags = tiny_flags([flag for flag in data if "validation" not in flag], train.folder)
    assert main(flags) == 0
    best, last = (load_file(train.folder / name / "model.safetensors") for name in ("best", "last"))
    assert all(torch.equal(best[name], last[name]) for name in last)


def test_a_tokenizer_that_the_user_has_is_used(train):
    train("--max_updates", 1)
    own = train.folder / "tokenizer"
    train("--max_updates", 1, "--tokenizer", own, "--vocab_size", 8000, folder="other")
    other = AutoTokenizer.from_pretrained(train.folder.parent / "other" / "best")
    assert other.get_vocab() == AutoTokenizer.from_pretrained(own).get_vocab()
    assert not (train.folder.parent / "other" / "tokenizer").exists()


def test_the_model_learns_to_reverse_words(train):
    recipe = {"learning_rate": 0.01, "warmup_steps": 20, "max_updates": 120, "batch_tokens": 600, "dropout": 0}
    train(*(f"--{name}={value}" for name, value in recipe.items()), "--eval_every", 60, "--logging_every", 20)
    losses = list(column(train.folder, "train_loss").values())
    assert losses[-1] < 0.6 * losses[0]


def test_the_number_of_processes_that_the_launcher_was_asked_for_is_known(monkeypatch, tmp_path):
    class Launcher:
        words = ()

        def parent(self):
            return self

        def cmdline(self):
            return list(self.words)

    monkeypatch.setattr("psutil.Process", Launcher)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config_file = tmp_path / "four.yaml"
    config_file.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 4\n")
    launch = ["python", "/bin/accelerate", "launch", "--cpu"]
    own = ["-m", "training.train", "--num_processes", "9"]
    for words, expected in (
        ([*launch, "--num_processes", "2", *own], 2),
        ([*launch, "--num_processes=3", *own], 3),
        ([*launch, *own], 1),
        ([*launch, "--config_file", str(config_file), *own], 4),
        (["bash", "--num_processes", "2"], 1),
        (["bash", "/accelerate/launch", "--num_processes", "2"], 1),
    ):
        Launcher.words = words
        assert processes_asked_for() == expected
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert processes_asked_for() == 4


def test_fsdp_that_accelerate_would_ignore_is_refused(train, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert train() == 1
    assert "the launcher was asked for FSDP, but accelerate runs NO" in capsys.readouterr().err


def test_fsdp_of_another_kind_than_training_has_is_refused():
    class Launched:
        distributed_type = DistributedType.FSDP
        is_fsdp2 = False
        mixed_precision = "bf16"

    with pytest.raises(ValueError, match="FSDP is version 1 here"):
        check_fsdp(Launched)
    Launched.is_fsdp2, Launched.mixed_precision = True, "fp16"
    with pytest.raises(ValueError, match="mixed_precision fp16 is not for FSDP"):
        check_fsdp(Launched)


def test_a_tracker_that_is_not_installed_is_refused(train, capsys):
    assert train("--report_to", "wandb") == 1
    assert "report_to (wandb) needs its package: pip install wandb" in capsys.readouterr().err


@pytest.mark.slow
def test_a_launcher_that_starts_fewer_processes_than_asked_for_is_refused(data, tmp_path):
    command = [*ACCELERATE, "--cpu", "--num_processes", 2, "-m", "training.train", *tiny_flags(data, tmp_path)]
    result = run(command, check=False)
    assert result.returncode != 0
    assert b"asked for 2 processes, but 1 would train together" in result.stderr


@pytest.mark.slow
def test_the_shipped_configuration_of_two_processes_runs_two(data, tmp_path):
    config = "training/configs/accelerate/cpu_two_processes.yaml"
    run([*ACCELERATE, "--config_file", config, "-m", "training.train", *tiny_flags(data, tmp_path / "two")])
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    assert record["arguments"]["num_processes"] == record["sessions"][0]["num_processes"] == 2
    assert json.loads((tmp_path / "two" / "results.json").read_text())["updates"] == 6


@pytest.mark.parametrize(
    ("name", "processes", "machines", "launcher"),
    [
        ("one_gpu", 1, 1, None),
        ("ddp", 8, 1, "multi_gpu"),
        ("several_machines", 16, 2, "multi_gpu"),
        ("fsdp2", 8, 1, "use_fsdp"),
        ("cpu_two_processes", 2, 1, "multi_gpu"),
    ],
)
def test_accelerate_takes_the_shipped_configurations_for_what_they_say(name, processes, machines, launcher):
    file = f"training/configs/accelerate/{name}.yaml"
    options = launch_command_parser().parse_args(["--config_file", file, "-m", "training.train"])
    options, *_ = _validate_launch_command(options)
    assert (options.num_processes, options.num_machines) == (processes, machines)
    assert [way for way in ("multi_gpu", "use_fsdp", "cpu") if getattr(options, way)] == [launcher] * bool(launcher)
    if launcher == "use_fsdp":
        assert int(options.fsdp_version) == 2


@pytest.mark.slow
def test_two_ranks_train_one_model_evaluate_every_row_once_and_stop_together(data, tmp_path):
    flags = ["--eval_every", 2, "--metric_for_best_model", "exact_match", "--early_stopping_patience", 2]
    flags = [*flags, "--gradient_accumulation_steps", 2]
    run([*TWO_RANKS, "training.train", *tiny_flags(data, tmp_path / "two"), *flags, "--max_updates", 50])
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    assert record["arguments"]["num_processes"] == record["sessions"][0]["num_processes"] == 2
    results = json.loads((tmp_path / "two" / "results.json").read_text())
    assert results["stopped"] == "2 evaluations without a better exact_match"
    assert results["updates"] == 6
    for step, rate in column(tmp_path / "two", "learning_rate").items():
        assert rate == pytest.approx(D_MODEL**-0.5 * min(step**-0.5, step * WARMUP**-1.5), rel=1e-12)

    # One process scores the same model alike: no row is left out or counted twice.
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "two" / "best")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "two" / "best")
    losses, targets = 0.0, 0
    files = [data[data.index(f"--validation_{side}") + 1] for side in ("source", "target")]
    with open(files[0]) as sources, open(files[1]) as references, torch.no_grad():
        for source, reference in zip(sources, references, strict=True):
            labels = torch.tensor([tokenizer(reference.rstrip("\n"))["input_ids"]])
            ids = torch.tensor([tokenizer(source.rstrip("\n"))["input_ids"]])
            scores = model.eval()(input_ids=ids, labels=labels).logits.log_softmax(-1)
            losses -= float(scores[0].gather(1, labels[0, :, None]).sum())
            targets += labels.shape[1]
    assert results["validation"]["loss"] == pytest.approx(losses / targets, rel=1e-5)


@pytest.mark.slow
def test_two_ranks_interrupted_and_started_again_are_the_run_that_was_not(data, tmp_path):
    command = [*TWO_RANKS, "training.train"]
    flags = ["--save_every", 2]
    run([*command, *tiny_flags(data, tmp_path / "whole"), *flags])
    run([*command, *tiny_flags(data, tmp_path / "parts"), *flags, "--max_updates", 4])
    run([*command, *tiny_flags(data, tmp_path / "parts"), *flags, "--allow_changes"])
    # The shorter run also evaluated its last update, in the middle of the epoch.
    whole, parts = (column(tmp_path / name, "train_loss") for name in ("whole", "parts"))
    assert whole == parts
    weights, others = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


@pytest.mark.slow
def test_a_killed_process_continues_exactly(data, tmp_path):
    flags = ["--save_every", 5, "--max_updates", 60]
    main([*tiny_flags(data, tmp_path / "whole"), *map(str, flags)])
    command = [*PYTHON, "training.train", *tiny_flags(data, tmp_path / "killed"), *flags]
    process = subprocess.Popen([str(word) for word in command], cwd=CLONE, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not find_checkpoints(tmp_path / "killed") and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "results.json").exists()
    run(command)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_the_demo_shrunken_translates_its_examples_alike_in_a_fresh_process(tmp_path):
    shrink = ["--max_updates", 8, "--cooldown_steps", 2, "--eval_every", 4, "--eval_max_rows", 10, "--num_beams", 1]
    config = ["--config", "training/configs/demo.yaml", "--output_dir", tmp_path, "--max_length_b", 2]
    run([*ACCELERATE, "-m", "training.train", *config, *shrink])
    sources = (tmp_path / "examples.source.txt").read_bytes()
    assert len(sources.splitlines()) == 5
    output = run([*PYTHON, "training.translate", "--model", tmp_path / "best", "--device", "cpu"], stdin=sources).stdout
    assert output == (tmp_path / "examples.translation.txt").read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--validation_source", "missing", "--validation_target", "missing"], "missing: there is no such file"),
        (["--tokenizer", "missing/tokenizer/folder"], "missing/tokenizer/folder"),
        (["--bleu_tokenize", "nonsense"], "bleu_tokenize ('nonsense')"),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_not_a_traceback(train, capsys, flags, message):
    assert train(*flags) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_early_stopping_without_validation_is_refused(train, data, capsys):
    AcceleratorState._reset_state(True)
    assert main([*tiny_flags(data[:4], train.folder), "--early_stopping_patience", "3"]) == 1
    assert "early_stopping_patience (3) needs a validation split" in capsys.readouterr().err


def test_a_tokenizer_whose_ids_have_gaps_gets_a_model_that_has_them_all(train, tmp_path):
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{word: 30 + index for index, word in enumerate(WORDS)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **specials).save_pretrained(tmp_path / "words")
    assert train("--tokenizer", tmp_path / "words", "--max_updates", 1) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(train.folder / "last")
    assert model.config.vocab_size == 30 + len(WORDS)


def test_the_record_holds_the_defaults_that_the_arguments_came_to(train):
    train("--max_updates", 1)
    resolved = json.loads((train.folder / "run.json").read_text())["resolved"]
    assert resolved["model"]["attention_dropout"] == 0
    assert resolved["model"]["layer_norm_eps"] == 1e-5
    assert resolved["peak_learning_rate"] == pytest.approx((D_MODEL * WARMUP) ** -0.5)
