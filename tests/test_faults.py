"""What goes wrong around a run gives a clear error, and loses no finished work."""

import contextlib
import itertools
import json
import logging
import resource
import shutil
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import training.loop
from tests.conftest import tiny_model
from tests.interruptions import Setting, arguments_of, equal_weights, make_data, metrics, train
from training.checkpoint import fault_of, find_checkpoints, load_checkpoint, repair
from training.loading import load
from training.objective import accumulate_gradient
from training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run that nothing went wrong with."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train([*arguments_of(Setting(), data, run), "--keep_checkpoints", "0"]) == [0]
    return run


@pytest.fixture
def copy(whole, tmp_path):
    """The whole run as it was after update 12: without results, and with the checkpoints of updates 4, 8 and 12."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "update-14")
    (run / "results.json").unlink()
    return run


def start(data, run, *flags, ranks=1, inject=None, setting=None):
    """Start or continue a run; return the exit codes and what was printed."""
    log = run.parent / "log.txt"
    log.unlink(missing_ok=True)
    arguments = arguments_of(setting or Setting(ranks), data, run)
    codes = train([*arguments, *map(str, flags)], ranks, inject, log)
    text = log.read_text()
    assert "Traceback" not in text, text
    return codes, text


# The disk ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk_at(update):
    """The kernel refuses to let a file of the update's checkpoint grow beyond a few bytes."""
    save = training.loop.save_checkpoint

    def wrapped(run, model, tokenizer, checkpoint):
        if checkpoint.progress.update == update:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        save(run, model, tokenizer, checkpoint)

    with mock.patch.object(training.loop, "save_checkpoint", wrapped):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_ends_the_run_with_what_was_saved_before(data, tmp_path, ranks):
    run = tmp_path / "run"
    codes, text = start(data, run, ranks=ranks, inject=lambda rank: full_disk_at(8))
    assert codes == [1] * ranks
    assert "update-8 cannot be written" in text
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["update-4"]
    assert fault_of(run / "checkpoints" / "update-4") is None
    assert start(data, run, ranks=ranks)[0] == [0] * ranks
    assert start(data, tmp_path / "other", ranks=ranks)[0] == [0] * ranks
    assert metrics(run) == metrics(tmp_path / "other")
    assert equal_weights(run, tmp_path / "other")


def test_a_checkpoint_truncated_at_any_byte_is_seen(copy):
    folder = find_checkpoints(copy)[-1]
    assert fault_of(folder) is None
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        json_end = len(content) - (file.name == "sha256.json")  # its last byte is the end of the line
        lengths = range(json_end) if len(content) < 2000 else (0, 1, 7, 8, 9, len(content) // 2, len(content) - 1)
        for length in lengths:
            file.write_bytes(content[:length])
            assert fault_of(folder) is not None, (file.name, length)
        file.unlink()
        assert fault_of(folder) is not None, file.name
        file.write_bytes(content)
    assert fault_of(folder) is None


def test_a_single_bit_that_flipped_is_seen(copy):
    folder = find_checkpoints(copy)[-1]
    for name in ("model.safetensors", "optimizer.pt", "average.safetensors", "training_state.json", "tokenizer.json"):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        assert name in fault_of(folder)
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_checkpoints_are_set_aside_aloud_and_the_one_before_is_used(data, whole, copy, damaged):
    for folder in find_checkpoints(copy)[-damaged:]:
        file = folder / "optimizer.pt"
        file.write_bytes(file.read_bytes()[:-10])
    codes, text = start(data, copy)
    assert codes == [0]
    assert text.count("is damaged (optimizer.pt is not what was written)") == damaged
    assert f"continuing from {copy / 'checkpoints' / f'update-{12 - 4 * damaged}'}" in text
    assert (copy / "checkpoints" / "damaged-update-12").exists()
    assert metrics(copy) == metrics(whole)
    assert equal_weights(copy, whole)


@pytest.mark.slow
def test_a_run_without_a_whole_checkpoint_is_refused_and_left_as_it_is(data, copy):
    for folder in find_checkpoints(copy):
        (folder / "model.safetensors").unlink()
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    codes, text = start(data, copy)
    assert codes == [1]
    assert "no checkpoint of" in text
    assert "update-4: model.safetensors cannot be read" in text
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == names


def test_what_a_crash_left_half_done_is_undone(copy):
    best = (copy / "best" / "model.safetensors").read_bytes()
    (copy / "best").rename(copy / ".best.old")  # between the two renames
    shutil.copytree(copy / "last", copy / ".last.old")  # after them
    (copy / "checkpoints" / ".update-16.tmp").mkdir()
    repair(copy)
    assert (copy / "best" / "model.safetensors").read_bytes() == best
    assert not list(copy.rglob(".*.old")) + list(copy.rglob(".*.tmp"))
    assert [path.name for path in find_checkpoints(copy)] == ["update-4", "update-8", "update-12"]


@pytest.mark.slow
def test_a_damaged_best_model_is_named_with_the_checkpoint_that_has_it(data, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "results.json").unlink()
    file = run / "best" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    codes, text = start(data, run, "--keep_checkpoints", 0)
    assert codes == [1]
    assert f"{run / 'best'} cannot be loaded" in text
    assert "checkpoints/update-" in text


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_beginning_is_named(data, tmp_path):
    def full(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        return contextlib.nullcontext()

    codes, text = start(data, tmp_path / "run", inject=full)
    assert codes == [1]
    assert "cannot be written" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_a_torn_record_is_named(data, copy, name):
    text = (copy / name).read_text()
    (copy / name).write_text(text[:40] + "\n" + text[60:])
    codes, text = start(data, copy, "--keep_checkpoints", 0)
    assert codes == [1]
    assert f"{copy / name}" in text
    assert "torn" in text


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["/proc/runs", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(data, tmp_path, folder):
    (tmp_path / "file").write_text("not a folder")
    codes, text = start(data, tmp_path / "run", "--output_dir", tmp_path / folder)
    assert codes == [1]
    assert "error: " in text
    assert folder.split("/")[-1] in text


# Numbers -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nan_at(*updates):
    """The loss of these updates is not a number, on this rank."""
    calls = itertools.count(1)
    backward = Accelerator.backward

    def accumulate(*arguments, **options):
        factor = float("nan") if next(calls) in updates else 1.0
        with mock.patch.object(Accelerator, "backward", lambda self, loss: backward(self, loss * factor)):
            return accumulate_gradient(*arguments, **options)

    with mock.patch.object(training.loop, "accumulate_gradient", accumulate):
        yield


def weights_of(run, update):
    return load_file(run / "checkpoints" / f"update-{update}" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_that_is_not_finite_is_skipped_on_all_ranks_and_reported(data, tmp_path, ranks):
    run = tmp_path / "run"
    flags = ["--save_every", 1, "--keep_checkpoints", 0, "--max_skipped_updates", 1]
    on_the_last = {ranks - 1: lambda: nan_at(5, 9)}
    codes, text = start(
        data, run, *flags, ranks=ranks, inject=lambda rank: on_the_last.get(rank, contextlib.nullcontext)()
    )
    assert codes == [0] * ranks
    assert "update 5 is skipped (1 of 1): the loss of rank 0 is " in text
    assert "update 9 is skipped (1 of 1)" in text
    before, at, after = (weights_of(run, update) for update in (4, 5, 6))
    assert all(torch.equal(tensor, at[name]) for name, tensor in before.items())
    assert not all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(tensor.isfinite().all() for tensor in weights_of(run, 14).values())
    losses = [row["train_loss"] for row in metrics(run) if "train_loss" in row]
    assert all(0 < loss < 10 for loss in losses)


@pytest.mark.slow
def test_too_many_such_updates_end_the_run_with_the_batch_in_a_file(data, whole, tmp_path):
    run = tmp_path / "run"
    codes, text = start(data, run, "--max_skipped_updates", 2, inject=lambda rank: nan_at(*range(6, 15)))
    assert codes == [1]
    assert "3 updates in a row are not finite, the last is 8" in text
    saved = json.loads((run / "not-finite-update-8-rank-0.json").read_text())
    assert saved["gradient_norm"] == "nan"
    sources = (data["train_source"]).read_text().split("\n")
    assert {row["source"].removesuffix("</s>") for row in saved["rows"]} <= set(sources)
    assert [path.name for path in find_checkpoints(run)] == ["update-4"]
    assert start(data, run)[0] == [0]  # the cause was not in the data
    assert metrics(run) == metrics(whole)
    assert equal_weights(run, whole)


# What the run reads ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ["train_target", "validation_source"])
def test_data_that_changed_between_two_starts_is_refused_by_name(data, tmp_path, streamed, name):
    mine = {key: tmp_path / file.name for key, file in data.items()}
    for key, file in data.items():
        shutil.copy(file, mine[key])
    run = tmp_path / "run"
    setting = Setting(streamed=streamed)
    assert start(mine, run, "--max_updates", 4, setting=setting)[0] == [0]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    mine[name].write_text(mine[name].read_text().replace("hund", "Hund", 1))
    codes, text = start(mine, run, "--max_updates", 4, setting=setting)
    assert codes == [1]
    assert "what it reads has changed: " in text
    assert (name if streamed and name.startswith("train") else f"{name.split('_')[0]} data") in text
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_line_that_cannot_be_read_ends_a_stream_by_name_with_what_was_saved(data, tmp_path, workers):
    mine = dict(data) | {"train_source": tmp_path / "train.source"}
    lines = data["train_source"].read_bytes().split(b"\n")
    mine["train_source"].write_bytes(b"\n".join([*lines[:55], b"\xff", *lines[56:]]))
    flags = ["--save_every", 1, "--tokenizer_rows", 40]
    codes, text = start(mine, tmp_path / "run", *flags, setting=Setting(workers=workers, streamed=True))
    assert codes == [1]
    assert "train.source, line 56: text must be UTF-8" in text
    assert find_checkpoints(tmp_path / "run")


@pytest.mark.slow
def test_an_empty_validation_set_is_refused_by_name(data, tmp_path):
    for side in ("source", "target"):
        (tmp_path / f"empty.{side}").write_text("")
    mine = dict(data) | {f"validation_{side}": tmp_path / f"empty.{side}" for side in ("source", "target")}
    codes, text = start(mine, tmp_path / "run")
    assert codes == [1]
    assert "empty.source: the file is empty" in text


def test_a_tokenizer_with_ids_that_the_model_does_not_have_is_refused(tmp_path):
    tiny_model(vocab_size=260).save_pretrained(tmp_path)
    tokenizer = train_tokenizer(["ein Haus und ein Baum"] * 3, vocab_size=265)
    tokenizer.save_pretrained(tmp_path)
    highest = max(tokenizer.get_vocab().values())
    assert highest >= 260
    with pytest.raises(ValueError, match=f"ids up to {highest}, but the model's vocab_size is 260"):
        load(str(tmp_path), "cpu")


@pytest.mark.slow
def test_initial_weights_begin_a_run_and_are_refused_if_they_are_of_another_model(data, whole, tmp_path):
    first = ["--initial_weights", whole / "last", "--max_updates", 1, "--learning_rate", 1e-12, "--ema_decay", 0]
    assert start(data, tmp_path / "run", *first)[0] == [0]
    weights, begun = (load_file(run / "last" / "model.safetensors") for run in (whole, tmp_path / "run"))
    for name, tensor in weights.items():
        torch.testing.assert_close(begun[name], tensor, rtol=0, atol=1e-9)
    codes, text = start(data, tmp_path / "wider", *first, "--d_ff", 32)
    assert codes == [1]
    assert "are of different architectures: d_ff is 24 there and 32 here" in text
    codes, text = start(data, tmp_path / "heads", *first, "--num_attention_heads", 4)  # the shapes are the same
    assert codes == [1]
    assert "are of different architectures: num_attention_heads is 2 there and 4 here" in text
    words = train_tokenizer(["abc"] * 3, vocab_size=300)
    words.add_tokens([f"word{number}" for number in range(300)])
    words.save_pretrained(tmp_path / "words")
    codes, text = start(data, tmp_path / "other", *first, "--tokenizer", tmp_path / "words")
    assert codes == [1]
    assert "the tokenizer has ids up to" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--num_attention_heads=4", "num_attention_heads is 2 there and 4 here"),
        ("--d_model=32", "d_model is 16 there and 32 here"),
    ],
)
def test_a_run_is_not_continued_with_another_architecture_even_if_changes_are_allowed(data, copy, flag, message):
    codes, text = start(data, copy, flag, "--allow_changes", "--keep_checkpoints", 0)
    assert codes == [1]
    assert f"update-12 and the model to train are of different architectures: {message}" in text
    assert find_checkpoints(copy)[-1].name == "update-12"


def test_a_checkpoint_is_not_loaded_at_other_depths(copy, tmp_path):
    """Tensors of the same names and shapes, of which other depths make use."""
    shared = {"parameter_sharing": "all", "num_unique_layers": 2, "encoder_layers": 4, "decoder_layers": 4}
    tiny_model(sharing_order="sequence", **shared).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"sharing_order 'sequence'.* there, .*sharing_order 'cycle'.* here"):
        load_checkpoint(tmp_path, tiny_model(sharing_order="cycle", **shared))


def test_a_warning_of_repair_names_the_fault(copy, caplog):
    (find_checkpoints(copy)[-1] / "training_state.json").unlink()
    with caplog.at_level(logging.WARNING, logger="training"):
        repair(copy)
    assert "training_state.json cannot be read (No such file or directory)" in caplog.text
