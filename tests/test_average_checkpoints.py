"""The mean of checkpoints' weights."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.conftest import tiny_model
from training.average_checkpoints import average_checkpoints, main
from training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with three checkpoints of different weights."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer(["ein Haus", "der Hund"], vocab_size=262)
    for number, update in enumerate((5, 10, 100)):
        model = tiny_model(seed=number, vocab_size=len(tokenizer))
        model.generation_config.num_beams = 3
        model.save_pretrained(folder / "checkpoints" / f"update-{update}")
        tokenizer.save_pretrained(folder / "checkpoints" / f"update-{update}")
    return folder


def checkpoints(run, *updates):
    return [run / "checkpoints" / f"update-{update}" for update in updates]


def test_every_stored_tensor_is_the_mean(run, tmp_path):
    folders = checkpoints(run, 5, 10, 100)
    assert main(["--checkpoints", *map(str, folders), "--output", str(tmp_path / "mean")]) == 0
    stored = [load_file(folder / "model.safetensors") for folder in folders]
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    assert mean.keys() == stored[0].keys()
    for name, tensor in mean.items():
        expected = np.mean([tensors[name].double().numpy() for tensors in stored], axis=0)
        np.testing.assert_array_equal(tensor.numpy(), expected.astype(np.float32))


def test_tied_weights_stay_tied_and_are_averaged_once(run):
    model = average_checkpoints(checkpoints(run, 5, 10))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    expected = (tiny_model(0, vocab_size=262).lm_head.weight + tiny_model(1, vocab_size=262).lm_head.weight) / 2
    torch.testing.assert_close(model.lm_head.weight, expected)


def test_one_checkpoint_is_its_own_mean(run):
    model = average_checkpoints(checkpoints(run, 10))
    for name, tensor in tiny_model(1, vocab_size=262).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_the_newest_checkpoints_of_a_run_are_taken_in_the_order_of_their_updates(run, tmp_path):
    assert main(["--run", str(run), "--last", "2", "--output", str(tmp_path / "a")]) == 0
    newest = map(str, checkpoints(run, 10, 100))  # as names, update-100 would come before update-5
    assert main(["--checkpoints", *newest, "--output", str(tmp_path / "b")]) == 0
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in "ab"]
    assert files[0] == files[1]
    for file in files[0]:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_the_result_loads_with_tokenizer_and_generation_config(run, tmp_path):
    main(["--run", str(run), "--last", "3", "--output", str(tmp_path / "mean")])
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean").generation_config.num_beams == 3
    assert AutoTokenizer.from_pretrained(tmp_path / "mean")("Haus")["input_ids"][-1] == 2


def test_checkpoints_of_different_models_are_refused(run, tmp_path):
    tiny_model(d_ff=28, vocab_size=262).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of different architectures: d_ff is 28 there and 24 here"):
        average_checkpoints([*checkpoints(run, 5), tmp_path])
    with pytest.raises(ValueError, match="nothing to average"):
        average_checkpoints([])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--last", "4"], r"--last (4) must be from 1 to the 3 checkpoints"),
        (["--last", "0"], r"--last (0) must be from 1 to the 3 checkpoints"),
        ([], "--run and --last go together"),
    ],
)
def test_an_impossible_number_of_checkpoints_is_refused(run, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["--run", str(run), *flags, "--output", str(tmp_path / "mean")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


def test_nothing_is_overwritten(run, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for output in (tmp_path, run):
        with pytest.raises(SystemExit):
            main(["--run", str(run), "--last", "2", "--output", str(output)])
        assert "exists and is not empty: nothing is overwritten" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(list((run / "checkpoints").iterdir())) == 3


def test_the_same_tensors_at_other_depths_are_not_averaged(tmp_path):
    for order in ("sequence", "cycle"):
        depths = {"encoder_layers": 4, "decoder_layers": 4, "num_unique_layers": 2}
        tiny_model(parameter_sharing="all", sharing_order=order, **depths).save_pretrained(tmp_path / order)
    with pytest.raises(ValueError, match=r"of different architectures: vanilla_trm with .*sharing_order 'cycle'"):
        average_checkpoints([tmp_path / "sequence", tmp_path / "cycle"])
