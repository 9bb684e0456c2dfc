"""ONNX files and programs of torch.export: what they decode is what `generate` decodes, where the package is not."""

import json
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from hf_vanilla_trm import VanillaTrmEncoderModel
from hf_vanilla_trm.onnx_export import OnnxTranslator, encodings, export_onnx, export_programs
from tests.conftest import tiny_config, tiny_model
from tests.memorised import memorised, one_source, three_sources, without_labels

SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25}
CASES = [
    pytest.param({}, id="as in the paper"),
    pytest.param({"max_position_embeddings": 4}, id="longer than the position table"),
    pytest.param({"attention_bias": True, "output_bias": True, "decoder_layers": 3}, id="biases, unequal depths"),
    pytest.param({"activation_function": "gelu", "scale_embedding": False}, id="gelu, embeddings as they are"),
    pytest.param(SEPARATE | {"tie_word_embeddings": False}, id="separate vocabularies, output untied"),
    pytest.param({"parameter_sharing": "all", "embedding_size": 12}, id="all shared, factorised"),
    pytest.param({"parameter_sharing": "attention"}, id="attention shared"),
    pytest.param(
        {"parameter_sharing": "attention", "encoder_layers": 4}
        | {"num_unique_layers": 2, "sharing_order": "cycle_reverse"},
        id="attention shared in a cycle and back",
    ),
    pytest.param({"parameter_sharing": "ffn"} | SEPARATE, id="ffn shared, separate vocabularies"),
]


def greedy_by_generate(model, source, max_length):
    """Tokens behind the start token, EOS included, without the padding of what is finished."""
    generated = model.generate(**source, max_new_tokens=max_length, num_beams=1, do_sample=False)
    rows = [row[1:] for row in generated.tolist()]
    return [row[: row.index(2) + 1] if 2 in row else row for row in rows]


def assert_same_logits(encode, step, model, batch):
    """The graphs, fed with a batch and the tokens before each position, against the model's forward.

    Args:
        encode: Takes tokens and mask, returns the encoder's output and `cross`.
        step: Takes tokens, mask, `cross` and the past, returns logits and the longer past.
    """
    source = without_labels(batch)
    inputs = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    with torch.no_grad():
        expected = model(**source, decoder_input_ids=inputs)
    encoded, cross = encode(*source.values())
    is_token = source["attention_mask"] == 1
    torch.testing.assert_close(encoded[is_token], expected.encoder_last_hidden_state[is_token], rtol=1e-4, atol=1e-4)
    config = model.config
    heads, d_k = config.num_attention_heads, config.d_model // config.num_attention_heads
    past = torch.zeros(config.decoder_layers, 2, len(inputs), heads, 0, d_k)
    for place in range(inputs.size(1)):
        logits, past = step(inputs[:, place : place + 1], source["attention_mask"], cross, past)
        assert past.shape == (config.decoder_layers, 2, len(inputs), heads, place + 1, d_k)
        torch.testing.assert_close(logits[:, 0], expected.logits[:, place], rtol=1e-4, atol=1e-4)


def called(session, names):
    """An ONNX session as a function of tensors."""

    def call(*tensors):
        inputs = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, inputs)]

    return call


def assert_onnx_equals(translator, model, batch):
    encode = called(translator.encoder, ["input_ids", "attention_mask"])
    step = called(translator.decoder, ["decoder_input_ids", "attention_mask", "cross", "past"])
    assert_same_logits(encode, step, model, batch)


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    """The model of the first case and the folder with its ONNX files."""
    folder = tmp_path_factory.mktemp("onnx") / "new"
    export_onnx(memorised(updates=200), folder)
    return memorised(updates=200), folder


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES)
def test_onnx_runtime_gives_the_same_logits_and_greedy_tokens(changes, tmp_path):
    model, batch = memorised(updates=200, **changes), three_sources()
    export_onnx(model, tmp_path)
    translator = OnnxTranslator(tmp_path, threads=1)
    assert_onnx_equals(translator, model, batch)
    source = without_labels(batch)
    expected = greedy_by_generate(model, source, 13)
    assert translator.greedy(source["input_ids"], source["attention_mask"], 13) == expected
    assert len(set(map(tuple, expected))) == 3
    for row in range(3):  # sources of 30, 3 and 9 tokens by themselves
        alone = one_source(batch, row)
        assert translator.greedy(alone["input_ids"].tolist(), max_length=13) == greedy_by_generate(model, alone, 13)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [CASES[1], CASES[4], CASES[5], CASES[6]])
def test_programs_give_the_same_logits(changes, tmp_path):
    model, batch = memorised(updates=200, **changes), three_sources()
    export_programs(model, tmp_path)
    encode, step = (torch.export.load(tmp_path / f"{name}.pt2").module() for name in ("encoder", "decoder"))
    with torch.no_grad():
        assert_same_logits(encode, step, model, batch)
        assert_same_logits(encode, step, model, {name: tensor[1:2, :3] for name, tensor in batch.items()})


@pytest.mark.slow
def test_a_source_without_a_token_gives_what_the_model_gives(paper):
    model, folder = paper
    batch = three_sources()
    batch["attention_mask"][1] = 0
    assert_onnx_equals(OnnxTranslator(folder, threads=1), model, batch)


@pytest.mark.slow
def test_the_start_token_and_the_ends_are_those_of_the_generation_config(paper, tmp_path):
    model, folder = paper
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    source = without_labels(three_sources())
    whole = greedy_by_generate(model, source, 10)
    assert len({row[0] for row in whole}) == 3
    generation = json.loads((folder / "generation_config.json").read_text())
    first_tokens = [row[0] for row in whole[:2]]
    (tmp_path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": first_tokens}))
    found = OnnxTranslator(tmp_path, threads=1).greedy(*source.values(), max_length=4)
    for row, expected in zip(found, whole, strict=True):
        stops = [place for place, token in enumerate(expected[:4]) if token in first_tokens]
        assert row == expected[: stops[0] + 1 if stops else 4]
    config = json.loads((folder / "config.json").read_text())
    for name, content in (("config", config), ("generation_config", generation)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content | {"decoder_start_token_id": None}))
    with pytest.raises(ValueError, match=r"decoder_start_token_id \(None\) in .* must be a token"):
        OnnxTranslator(tmp_path)


@pytest.mark.slow
def test_nothing_to_translate_and_no_tokens_to_translate_into(paper):
    translator = OnnxTranslator(paper[1], threads=1)
    assert translator.greedy([]) == []
    with pytest.raises(ValueError, match=r"max_length \(0\) must be at least 1"):
        translator.greedy([[5, 2]], max_length=0)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"parameter_sharing": "all"}, {"parameter_sharing": "attention"}])
def test_every_parameter_stands_once_in_the_two_files(changes, tmp_path):
    """But the embedding that both stacks use, and the cross-attention's projections of the source."""
    import onnx

    model = tiny_model(vocab_size=300, **changes)
    export_onnx(model, tmp_path)
    numbers = []
    for name in ("encoder", "decoder"):
        tensors = onnx.load(tmp_path / f"{name}.onnx").graph.initializer
        numbers.append(sum(int(np.prod(tensor.dims)) for tensor in tensors))
    both_stacks = model.num_parameters() + model.model.shared.weight.numel()
    constants = 200  # angles of the positions, shapes
    assert both_stacks <= sum(numbers) <= both_stacks + constants


def run_elsewhere(code, folder):
    """Run code in a fresh interpreter outside of the clone; what it prints as JSON."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_the_files_need_onnx_runtime_and_numpy_only(paper):
    model, folder = paper
    source = without_labels(three_sources())
    code = f"""
        import json, sys
        import numpy, onnxruntime
        encoder, decoder = (
            onnxruntime.InferenceSession(name, providers=["CPUExecutionProvider"])
            for name in ("encoder.onnx", "decoder.onnx")
        )
        config = json.load(open("config.json"))
        ids, mask = numpy.array({source["input_ids"].tolist()}), numpy.array({source["attention_mask"].tolist()})
        _, cross = encoder.run(None, dict(input_ids=ids, attention_mask=mask))
        layers, heads = config["decoder_layers"], config["num_attention_heads"]
        past = numpy.zeros((layers, 2, 3, heads, 0, config["d_model"] // heads), dtype="float32")
        tokens = numpy.full((3, 1), config["decoder_start_token_id"])
        for _ in range(10):
            inputs = dict(decoder_input_ids=tokens[:, -1:], attention_mask=mask, cross=cross, past=past)
            logits, past = decoder.run(None, inputs)
            tokens = numpy.concatenate((tokens, logits.argmax(-1)), axis=1)
        assert not {{"torch", "transformers", "hf_vanilla_trm", "onnx"}} & set(sys.modules)
        print(json.dumps(tokens.tolist()))
    """
    expected = model.generate(**source, max_new_tokens=10, num_beams=1, do_sample=False).tolist()
    assert run_elsewhere(code, folder) == expected


@pytest.mark.slow
def test_the_programs_need_torch_only(tmp_path):
    model, source = memorised(updates=200, **SEPARATE), without_labels(three_sources())
    export_programs(model, tmp_path)
    code = f"""
        import json, sys
        import torch
        encoder, decoder = (torch.export.load(name).module() for name in ("encoder.pt2", "decoder.pt2"))
        config = json.load(open("config.json"))
        ids, mask = torch.tensor({source["input_ids"].tolist()}), torch.tensor({source["attention_mask"].tolist()})
        _, cross = encoder(ids, mask)
        layers, heads = config["decoder_layers"], config["num_attention_heads"]
        past = torch.zeros(layers, 2, 3, heads, 0, config["d_model"] // heads)
        tokens = torch.full((3, 1), config["decoder_start_token_id"])
        for _ in range(10):
            logits, past = decoder(tokens[:, -1:], mask, cross, past)
            tokens = torch.cat((tokens, logits.argmax(-1)), dim=1)
        assert not {{"transformers", "hf_vanilla_trm", "onnxruntime"}} & set(sys.modules)
        print(json.dumps(tokens.tolist()))
    """
    expected = model.generate(**source, max_new_tokens=10, num_beams=1, do_sample=False).tolist()
    assert run_elsewhere(code, tmp_path) == expected


@pytest.mark.slow
def test_an_export_is_not_bound_to_sizes_in_which_the_model_multiplies_by_pytorch(tmp_path):
    """From some size on, `linear` multiplies by oneDNN; the exporters see smaller examples."""
    model = tiny_model(d_model=64, d_ff=256)
    export_programs(model, tmp_path)
    encode, step = (torch.export.load(tmp_path / f"{name}.pt2").module() for name in ("encoder", "decoder"))
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 20, (33, 39), generator=generator)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[:, :3]}
    with torch.no_grad():
        assert_same_logits(encode, step, model, batch)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_exporting_without_a_package_names_the_extra_and_writes_nothing(monkeypatch, missing, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"this needs onnx and onnxscript: pip install 'hf_vanilla_trm\[export\]'"):
        export_onnx(tiny_model(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_translating_without_the_runtime_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"this needs onnxruntime: pip install 'hf_vanilla_trm\[export\]'"):
        OnnxTranslator(tmp_path)


@pytest.mark.parametrize("export", [export_onnx, export_programs])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: tiny_model().train(), r"the model is in training mode: call eval\(\)"),
        (lambda: tiny_model().bfloat16(), r"the model's dtype \(torch.bfloat16\) must be torch.float32"),
        (lambda: VanillaTrmEncoderModel(tiny_config()).eval(), "a VanillaTrmEncoderModel of type vanilla_trm cannot"),
    ],
    ids=["training", "bfloat16", "encoder only"],
)
def test_what_cannot_be_exported_is_refused(export, model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(model(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_an_opset_can_be_chosen(tmp_path):
    import onnx

    model = tiny_model(encoder_layers=1, decoder_layers=1)
    export_onnx(model, tmp_path, opset=21)
    for name in ("encoder", "decoder"):
        assert [used.version for used in onnx.load(tmp_path / f"{name}.onnx").opset_import if not used.domain] == [21]
    assert_onnx_equals(OnnxTranslator(tmp_path, threads=1), model, three_sources())


def test_an_opset_that_pytorch_does_not_write_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"opset \(13\) must be at least 18"):
        export_onnx(tiny_model(), tmp_path / "new", opset=13)
    assert not (tmp_path / "new").exists()


def test_positions_are_those_of_the_paper_at_any_distance():
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same, in the arithmetic of Python."""
    positions = [0, 1, 40, 12345]
    expected = [
        [(math.sin, math.cos)[place % 2](position / 10000 ** ((place - place % 2) / 6)) for place in range(6)]
        for position in positions
    ]
    torch.testing.assert_close(encodings(torch.tensor(positions), 6), torch.tensor(expected), rtol=0, atol=1e-6)
