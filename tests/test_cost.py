"""Estimates of cost against what PyTorch counts in a run."""

from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import training.cost
from hf_vanilla_trm import VanillaTrmForConditionalGeneration
from tests.conftest import tiny_config
from training.cost import (
    BatchShape,
    count_parameters,
    layer_activation_bytes,
    main,
    training_flops,
    update_seconds,
)
from training.train import main as train

BATCH = BatchShape(rows=3, source_length=7, target_length=5)
VARIANTS = [
    {},
    {"encoder_layers": 1, "decoder_layers": 3},
    {"embedding_size": 8},
    {"embedding_size": 16},
    {"d_model": 32, "d_ff": 40},
]


def step(config, batch):
    model = VanillaTrmForConditionalGeneration(config).train()
    source = torch.randint(3, 20, (batch.rows, batch.source_length))
    target = torch.randint(3, 20, (batch.rows, batch.target_length))
    return model, lambda: model(input_ids=source, attention_mask=torch.ones_like(source), labels=target).loss


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_the_operations_are_those_that_pytorch_counts(changes):
    config = tiny_config(attn_implementation="eager", **changes)
    _, loss = step(config, BATCH)
    with FlopCounterMode(display=False) as counter:
        loss().backward()
    assert training_flops(config, BATCH) == counter.get_total_flops()


def kept_bytes(config, batch):
    """Bytes that autograd keeps besides the parameters."""
    model, loss = step(config, batch)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()
    del value
    return sum(kept.values())


@pytest.mark.parametrize("changes", [{}, {"d_model": 32, "d_ff": 48}, {"num_attention_heads": 4}], ids=str)
def test_what_layers_keep_is_what_autograd_keeps_for_one_more(changes):
    batch = BatchShape(rows=2, source_length=16, target_length=16)
    sizes = {"attn_implementation": "sdpa", "dropout": 0.1, **changes}
    for side in ("encoder_layers", "decoder_layers"):
        shallow, deep = (tiny_config(**sizes, **{side: layers}) for layers in (2, 5))
        measured = kept_bytes(deep, batch) - kept_bytes(shallow, batch)
        expected = layer_activation_bytes(deep, batch) - layer_activation_bytes(shallow, batch)
        assert measured == pytest.approx(expected, rel=0.001)


def test_the_paper_s_models_have_the_paper_s_sizes():
    sizes = {"vocab_size": 37000, "encoder_layers": 6, "decoder_layers": 6}
    assert count_parameters(tiny_config(**sizes, d_model=512, d_ff=2048, num_attention_heads=8)) == 63_045_632
    assert count_parameters(tiny_config(**sizes, d_model=1024, d_ff=4096, num_attention_heads=16)) == 214_171_648


@pytest.mark.parametrize("flag", ["--teraflops", "--utilisation", "--gigabytes_per_second"])
@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan"])
def test_hardware_that_cannot_be_is_refused(capsys, flag, value):
    with pytest.raises(SystemExit):
        training.cost.main(["--config", "training/configs/demo.yaml", f"{flag}={value}"])
    assert f"{float(value)} must be above 0, and finite" in capsys.readouterr().err


def test_time_falls_with_cards_until_the_link_is_the_limit():
    def seconds(gpus, bandwidth):
        return update_seconds(8 * 10**14, 10**8, gpus, rate=10**14, bandwidth=bandwidth)

    assert seconds(1, 1) == 8
    assert seconds(4, 1e12) == 2  # all-reduce hidden
    # 2 * 7/8 * 4e8 bytes at 1e8 a second take 7 s, of which 2/3 s are hidden behind the one second of the products.
    assert seconds(8, 1e8) == pytest.approx(1 + 7 - 2 / 3)


@pytest.mark.parametrize(("size", "parameters"), [("base", "63.0M"), ("big", "214.2M")])
def test_the_configurations_of_the_paper_are_priced(tmp_path, monkeypatch, capsys, size, parameters):
    """By the command for it, and by a dry run of training, which reads no data and writes nothing."""
    config = str(Path(f"training/configs/wmt14_en_de_{size}.yaml").resolve())
    assert main(["--config", config]) == 0
    printed = capsys.readouterr().out
    assert f"({parameters}) with a vocabulary of 37,000" in printed
    assert all(said in printed for said in ("GiB", "GPU hours"))
    monkeypatch.chdir(tmp_path)
    assert train(["--config", config, "--dry-run"]) == 0
    assert capsys.readouterr().out == printed
    assert not list(tmp_path.iterdir())


def test_a_dry_run_follows_the_flags_and_refuses_what_cannot_be_priced(capsys):
    flags = ["--config", "training/configs/multi30k_tiny.yaml", "--dry_run", "True"]
    flags += ["--train_source", "no.en", "--train_target", "no.de"]
    assert train([*flags, "--parameter_sharing", "all"]) == 0
    # Embeddings, one encoder and one decoder layer: 12 square matrices, 2 feed-forward networks, 5 norms.
    feed_forward = 2 * 128 * 256 + 256 + 128
    layers = 12 * 128 * 128 + 2 * feed_forward + 5 * 2 * 128
    assert f"{10_000 * 128 + layers:,}" in capsys.readouterr().out
    assert train([*flags, "--tokenizer", "elsewhere"]) == 0
    assert "10,000 (assumed: the tokenizer given is not read)" in capsys.readouterr().out
    assert train([*flags, "--batch_tokens", "20"]) == 1
    assert "(28) must be at most batch_tokens (20)" in capsys.readouterr().err
