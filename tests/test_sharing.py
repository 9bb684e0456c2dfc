"""Parameters shared across layers: what is shared, what it counts, and that nothing else changes for it."""

import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel

from hf_vanilla_trm import (
    VanillaTrmConfig,
    VanillaTrmEncoderModel,
    VanillaTrmForConditionalGeneration,
    VanillaTrmForSequenceClassification,
    VanillaTrmModel,
    share_parameters,
    unshare_parameters,
)
from tests.conftest import spread_weights, tiny_config, tiny_model
from tests.launch import CLONE, PYTHON, TWO_RANKS, run
from training.convert_sharing import main
from training.tokenizer import train_tokenizer

MODES = ["none", "attention", "ffn", "all"]
SHARING = ["attention", "ffn", "all"]
SIX = {"encoder_layers": 6, "decoder_layers": 6, "num_unique_layers": 2, "sharing_order": "cycle_reverse"}

# (d_model, d_ff, layers, vocabulary), and the unique parameters of each mode.
COUNTS = {
    (128, 256, 4, 9712): (2_562_048, 1_972_224, 2_166_528, 1_572_864),
    (256, 1024, 4, 9712): (9_846_784, 7_487_488, 6_693_376, 4_326_400),
    (512, 2048, 6, 37000): (63_045_632, 47_316_992, 42_048_512, 26_294_272),
    (1024, 4096, 6, 37000): (214_171_648, 151_257_088, 130_234_368, 67_268_608),
}
COUNTS_WITH_BIAS = (2_568_192, 1_973_760, 2_172_672, 1_574_400)


def counted(config, model_class=VanillaTrmForConditionalGeneration):
    """Unique parameters, without memory for them."""
    with torch.device("meta"):
        model = model_class(config)
    return sum(parameter.numel() for parameter in model.parameters())


# Counts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", COUNTS)
@pytest.mark.parametrize("mode", MODES)
def test_unique_parameters_are_those_of_the_table(sizes, mode):
    d_model, d_ff, layers, vocab_size = sizes
    fields = {"encoder_layers": layers, "decoder_layers": layers, "num_attention_heads": 4, "parameter_sharing": mode}
    config = VanillaTrmConfig(vocab_size=vocab_size, d_model=d_model, d_ff=d_ff, **fields)
    assert counted(config) == COUNTS[sizes][MODES.index(mode)]


@pytest.mark.parametrize("mode", MODES)
def test_unique_parameters_with_biases_are_those_of_the_table(mode):
    fields = {"encoder_layers": 4, "decoder_layers": 4, "num_attention_heads": 4, "attention_bias": True}
    config = VanillaTrmConfig(vocab_size=9712, d_model=128, d_ff=256, parameter_sharing=mode, **fields)
    assert counted(config) == COUNTS_WITH_BIAS[MODES.index(mode)]


def formula(config):
    """Embeddings, then each stack: M or N of every kind of sub-layer, and the norms, two numbers a feature each."""
    d, f, v, e = config.d_model, config.d_ff, config.vocab_size, config.embedding_size or config.d_model
    attention = 4 * d * d + (4 * d if config.attention_bias else 0)
    feed_forward = 2 * d * f + d + f
    total = v * e  # source, target and output: one matrix
    if not config.share_encoder_decoder_embeddings:
        total += config.decoder_vocab_size * e
    if not config.tie_word_embeddings:
        total += config.decoder_vocab_size * e
    if e != d:
        total += e * d + d * e
    total += config.decoder_vocab_size if config.output_bias else 0
    for layers, attentions in ((config.encoder_layers, 1), (config.decoder_layers, 2)):
        shared = {"none": (), "attention": ("attention",), "ffn": ("ffn",), "all": ("attention", "ffn", "norm")}
        stored = dict.fromkeys(("attention", "ffn", "norm"), layers)
        stored |= dict.fromkeys(shared[config.parameter_sharing], config.num_unique_layers)
        norms = (attentions + 1) * 2 * d
        total += stored["attention"] * attentions * attention + stored["ffn"] * feed_forward + stored["norm"] * norms
    return total


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["sequence", "cycle", "cycle_reverse"])
@pytest.mark.parametrize("unique", [1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embedding_size": 8},
        {"tie_word_embeddings": False, "embedding_size": 6, "attention_bias": True},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25, "embedding_size": 4, "output_bias": True},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25, "tie_word_embeddings": False},
    ],
)
def test_unique_parameters_follow_a_closed_formula(mode, order, unique, changes):
    depths = {"encoder_layers": 6, "decoder_layers": 12, "num_unique_layers": unique, "sharing_order": order}
    config = tiny_config(parameter_sharing=mode, **depths, **changes)
    assert counted(config) == formula(config)


# Which depth uses what ---------------------------------------------------------------------------------------------

ORDERS = [
    ("sequence", 6, 3, "AABBCC"),
    ("cycle", 6, 3, "ABCABC"),
    ("cycle_reverse", 6, 3, "ABCCBA"),
    ("sequence", 6, 2, "AAABBB"),
    ("cycle", 6, 2, "ABABAB"),
    ("cycle_reverse", 6, 2, "ABABBA"),
    ("cycle_reverse", 9, 3, "ABCABCCBA"),
    ("cycle", 4, 1, "AAAA"),
    ("cycle_reverse", 4, 1, "AAAA"),
    ("sequence", 3, 3, "ABC"),
]


@pytest.mark.parametrize(("order", "depth", "unique", "expected"), ORDERS)
@pytest.mark.parametrize("mode", SHARING)
def test_depths_use_the_layers_of_their_order_in_both_stacks(mode, order, depth, unique, expected):
    depths = {"encoder_layers": depth, "decoder_layers": depth, "num_unique_layers": unique}
    model = VanillaTrmModel(tiny_config(parameter_sharing=mode, sharing_order=order, **depths))
    shared = {"attention": ["self_attn", "cross_attn"], "ffn": ["feed_forward"]}
    for stack in (model.encoder, model.decoder):
        everything = list(stack.sublayers_at(0))
        names = everything if mode == "all" else [name for name in shared[mode] if name in everything]
        for name in everything:
            uses = [stack.sublayers_at(place)[name] for place in range(depth)]
            letters = {id(module): letter for module, letter in zip(dict.fromkeys(uses), "ABC", strict=False)}
            spelled = "".join(letters.get(id(module), "?") for module in uses)
            assert (spelled == expected) if name in names else (len(set(uses)) == depth), name


def test_a_stack_shares_nothing_with_the_other():
    model = VanillaTrmModel(tiny_config(parameter_sharing="all", embedding_size=8))
    encoder, decoder = ({id(p) for p in stack.layers.parameters()} for stack in (model.encoder, model.decoder))
    assert encoder.isdisjoint(decoder)


def test_one_mode_is_the_unshared_model_when_every_layer_is_distinct(batch):
    """M = N, in the order of the depths: the same tensors under the same names, used alike."""
    plain = tiny_model()
    for mode in SHARING:
        other = VanillaTrmForConditionalGeneration(tiny_config(parameter_sharing=mode, num_unique_layers=2)).eval()
        other.load_state_dict(plain.state_dict())
        assert torch.equal(other(**batch).logits, plain(**batch).logits)


# ALBERT's and Takase and Kiyono's arrangements are one line of a configuration.
def test_published_arrangements_are_one_line_each():
    albert = tiny_config(encoder_layers=4, decoder_layers=4, parameter_sharing="all", embedding_size=8)
    assert len(VanillaTrmModel(albert).encoder.layers) == 1
    for depth in (6, 9):  # M = 3, depths 2M and 3M
        kwargs = {"parameter_sharing": "all", "num_unique_layers": 3, "sharing_order": "cycle_reverse"}
        deeper = VanillaTrmModel(tiny_config(encoder_layers=depth, decoder_layers=depth, **kwargs))
        assert len(deeper.encoder.layers) == len(deeper.decoder.layers) == 3


# Files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{}, {"embedding_size": 8}], ids=["full", "factorised"])
def test_a_file_holds_each_unique_tensor_once_and_layers_stay_tied_after_loading(tmp_path, batch, mode, changes):
    model = tiny_model(parameter_sharing=mode, **SIX, **changes)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    assert sum(tensor.numel() for tensor in saved.values()) == formula(model.config)
    header = (tmp_path / "model.safetensors").stat().st_size - 4 * formula(model.config)
    assert 0 < header < 200 * len(saved)

    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert loaded.num_parameters() == model.num_parameters() == formula(model.config)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    # cycle_reverse of two over six is ABABBA: depth 0 is depth 5.
    for stack in (loaded.model.encoder, loaded.model.decoder):
        first, last = stack.sublayers_at(0), stack.sublayers_at(5)
        for name, shared in (("self_attn", mode in ("attention", "all")), ("feed_forward", mode in ("ffn", "all"))):
            with torch.no_grad():
                next(first[name].parameters()).add_(1)
            same = torch.equal(next(first[name].parameters()), next(last[name].parameters()))
            assert same == shared


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameter_sharing": "none"}, "with parameter_sharing 'none'"),
        ({"parameter_sharing": "ffn"}, "with parameter_sharing 'ffn'"),
        ({"num_unique_layers": 2}, "num_unique_layers 2, sharing_order 'cycle'"),
        ({"sharing_order": "sequence"}, "num_unique_layers 3, sharing_order 'sequence'"),
    ],
)
@pytest.mark.parametrize("loader", [VanillaTrmForConditionalGeneration, AutoModelForSeq2SeqLM, VanillaTrmEncoderModel])
@pytest.mark.parametrize("way", ["arguments", "config"])
def test_a_checkpoint_is_not_loaded_into_another_arrangement(tmp_path, changes, words, loader, way):
    sharing = {"parameter_sharing": "all", "num_unique_layers": 3, "sharing_order": "cycle"}
    config = tiny_config(encoder_layers=6, decoder_layers=6, **sharing)
    VanillaTrmForConditionalGeneration(config).save_pretrained(tmp_path)
    other = tiny_config(encoder_layers=6, decoder_layers=6, **sharing | changes)
    with pytest.raises(ValueError, match="cannot be loaded into a model") as error:
        loader.from_pretrained(tmp_path, **(changes if way == "arguments" else {"config": other}))
    assert words in str(error.value)
    assert "has parameter_sharing 'all' (num_unique_layers 3, sharing_order 'cycle')" in str(error.value)
    assert loader.from_pretrained(tmp_path, config=config).config.num_unique_layers == 3


def test_a_checkpoint_is_not_loaded_by_the_config_of_another_folder(tmp_path):
    for order in ("cycle", "sequence"):
        config = tiny_config(encoder_layers=6, decoder_layers=6, num_unique_layers=3, parameter_sharing="all")
        config.sharing_order = order
        VanillaTrmForConditionalGeneration(config).save_pretrained(tmp_path / order)
    with pytest.raises(ValueError, match="cannot be loaded into a model"):
        VanillaTrmForConditionalGeneration.from_pretrained(tmp_path / "cycle", config=str(tmp_path / "sequence"))


def test_weights_without_a_config_load_into_the_config_that_is_given(tmp_path, batch):
    model = tiny_model(parameter_sharing="all")
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    loaded = VanillaTrmForConditionalGeneration.from_pretrained(tmp_path, config=model.config).eval()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"parameter_sharing": "all"}, {"parameter_sharing": "all", "sharing_order": "cycle"}),
        ({"parameter_sharing": "none"}, {"parameter_sharing": "all", "num_unique_layers": 2}),
        ({"parameter_sharing": "none"}, {"num_unique_layers": 2, "sharing_order": "cycle"}),
    ],
)
def test_the_same_arrangement_under_another_name_loads(tmp_path, batch, saved, wanted):
    model = tiny_model(**saved)
    model.save_pretrained(tmp_path)
    loaded = VanillaTrmForConditionalGeneration.from_pretrained(tmp_path, config=tiny_config(**wanted)).eval()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize(
    ("built", "later"),
    [
        ({"parameter_sharing": "all", "num_unique_layers": 2}, {"sharing_order": "cycle"}),
        ({"parameter_sharing": "attention"}, {"parameter_sharing": "none"}),
        ({"parameter_sharing": "none"}, {"parameter_sharing": "all"}),
    ],
)
def test_a_config_changed_after_construction_changes_no_model_and_is_not_saved_with_it(tmp_path, batch, built, later):
    config = tiny_config(encoder_layers=4, decoder_layers=4, **built)
    model = spread_weights(VanillaTrmForConditionalGeneration(config)).eval()
    expected = model(**batch).logits
    for name, value in later.items():
        setattr(config, name, value)
    assert torch.equal(model(**batch).logits, expected)
    with pytest.raises(ValueError, match="after the model was built: set it back, or convert"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_encoder_by_itself_does_not_ask_how_deep_a_decoder_would_be():
    sharing = {"parameter_sharing": "all", "num_unique_layers": 4}
    config = tiny_config(encoder_layers=4, decoder_layers=6, is_encoder_decoder=False, **sharing)
    assert len(VanillaTrmEncoderModel(config).encoder.layers) == 4


def test_a_checkpoint_from_before_there_was_sharing_is_an_unshared_one(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("parameter_sharing", "num_unique_layers", "sharing_order"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has parameter_sharing 'none', and cannot be loaded"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, parameter_sharing="all")


# Gradients ---------------------------------------------------------------------------------------------------------


def gradients(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", SHARING)
def test_the_gradient_of_a_shared_tensor_is_the_sum_over_its_uses(batch, mode):
    """In the hand-unrolled copy every use has a tensor of its own."""
    shared = tiny_model(parameter_sharing=mode, embedding_size=8, **SIX)
    unrolled = tiny_model(parameter_sharing="none", embedding_size=8, encoder_layers=6, decoder_layers=6)
    unrolled.load_state_dict(unrolled_weights(shared))
    assert torch.equal(unrolled(**batch).logits, shared(**batch).logits)
    got, single = gradients(shared, batch), gradients(unrolled, batch)
    expected = {name: torch.zeros_like(tensor) for name, tensor in got.items()}
    for name, tensor in single.items():
        expected[stored_name(name, mode)] += tensor
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def stored_name(name, mode):
    """Where the sharing model of SIX (ABABBA) keeps a tensor of the unshared one."""
    parts = name.split(".")
    if "layers" not in parts:
        return name
    place = parts.index("layers") + 1
    is_shared = {
        "attention": parts[place + 1].endswith("_attn"),
        "ffn": parts[place + 1] == "feed_forward",
        "all": True,
    }
    if is_shared[mode]:
        parts[place] = str("ABABBA".index("ABABBA"[int(parts[place])]))
    return ".".join(parts)


def unrolled_weights(shared):
    weights, mode = shared.state_dict(), shared.config.parameter_sharing
    names = tiny_model(embedding_size=8, encoder_layers=6, decoder_layers=6).state_dict()
    return {name: weights[stored_name(name, mode)] for name in names}


@pytest.mark.parametrize("mode", MODES)
def test_each_unique_tensor_is_once_in_the_optimizer_in_the_norm_and_in_the_count(batch, mode):
    model = tiny_model(parameter_sharing=mode, **SIX)
    parameters = list(model.parameters())
    assert len(parameters) == len({id(parameter) for parameter in parameters})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert sum(tensor.numel() for group in optimizer.param_groups for tensor in group["params"]) == formula(
        model.config
    )
    grads = gradients(model, batch)
    norm = math.sqrt(sum(tensor.double().square().sum() for tensor in grads.values()))
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e9) == pytest.approx(norm, rel=1e-5)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():  # one step, not one for each use
        torch.testing.assert_close(parameter, before[name] - grads[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_gives_the_same_gradients(batch, mode, reentrant):
    model = tiny_model(parameter_sharing=mode, embedding_size=8, **SIX)
    model.train()
    expected = gradients(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    for stack in (model.model.encoder, model.model.decoder):
        stack.sublayers_at(0)["feed_forward"].register_forward_hook(lambda *_: calls.append(1))
    got = gradients(model, batch)
    once = 2 * (3 if mode in ("ffn", "all") else 1)  # ABABBA: A is used three times, in two stacks
    assert len(calls) == 2 * once, "nothing was computed again"
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
def test_two_ranks_with_ddp_and_with_fsdp_have_the_gradients_of_one(tmp_path):
    """Every mode, and with DDP also with checkpointing, in one launch; no find_unused_parameters."""
    run([*TWO_RANKS, "tests.sharing_ranks", str(tmp_path)])
    results = torch.load(tmp_path / "gradients.pt")
    assert results.pop("num_processes") == 2
    assert len(results) == 4 * 3
    for (mode, way), (got, expected) in results.items():
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-6, msg=f"{mode} {way} {name}")


# Decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SHARING)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_cache_on_and_off_decode_alike(batch, mode, num_beams):
    depths = {"encoder_layers": 4, "decoder_layers": 4}
    model = tiny_model(seed=21, parameter_sharing=mode, **depths)
    options = {"num_beams": num_beams, "max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True}
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    cached, uncached = (model.generate(**source, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    assert len({tuple(row.tolist()) for row in cached.sequences}) > 1
    for step, other in zip(cached.scores, uncached.scores, strict=True):
        finite = torch.isfinite(step)
        torch.testing.assert_close(step[finite], other[finite], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_cache_has_an_entry_for_every_depth(batch, mode):
    model = tiny_model(parameter_sharing=mode, encoder_layers=4, decoder_layers=4)
    cache = model(**batch | {"labels": None}, decoder_input_ids=torch.tensor([[0, 5]] * 3)).cache
    for part, length in ((cache.self_attention_cache, 2), (cache.cross_attention_cache, 7)):
        assert len(part.layers) == 4
        assert all(layer.keys.shape == (3, 2, length, 8) for layer in part.layers)
        # Keys of the encoder's output are the same at every depth where cross-attention is shared.
        same = torch.equal(part.layers[0].keys, part.layers[3].keys)
        assert same == (part is cache.cross_attention_cache and mode in ("attention", "all"))


# All classes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_class", [VanillaTrmModel, VanillaTrmEncoderModel, VanillaTrmForSequenceClassification])
def test_the_encoder_of_every_class_is_the_translation_models(tmp_path, batch, mode, model_class):
    whole = tiny_model(parameter_sharing=mode, embedding_size=8, **SIX)
    whole.save_pretrained(tmp_path)
    loaded, report = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert all(name.startswith("classifier") for name in report["missing_keys"])
    expected = whole.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    assert torch.equal(loaded.eval().get_encoder()(batch["input_ids"], batch["attention_mask"])[0], expected)


@pytest.mark.parametrize("mode", MODES)
def test_factorised_embeddings_resize_and_stay_tied(batch, mode):
    model = tiny_model(parameter_sharing=mode, embedding_size=8)
    before = model(**batch).logits
    model.resize_token_embeddings(23)
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight is model.model.shared.weight
    assert model.model.decoder.embed_projection.weight is model.model.encoder.embed_projection.weight
    assert model.lm_head.weight.shape == (23, 8)
    torch.testing.assert_close(model(**batch).logits[..., :20], before)


def test_factorised_embeddings_are_projected_before_they_are_scaled_and_before_the_output(batch):
    """E (V x e) P (e x d) in place of the embedding, and W (d x e) E^T (e x V) in place of the tied output."""
    model = tiny_model(embedding_size=8)
    plain = tiny_model(tie_word_embeddings=False)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "layers" in name}
    plain.load_state_dict(weights, strict=False)
    embedding = model.model.shared.weight @ model.model.encoder.embed_projection.weight.T
    output = model.model.shared.weight @ model.lm_head_projection.weight
    with torch.no_grad():
        plain.model.shared.weight.copy_(embedding)
        plain.lm_head.weight.copy_(output)
    assert embedding.shape == output.shape == (20, 16)
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-4)


def test_the_projections_of_a_fresh_model_keep_the_scale_of_what_they_get():
    """Embeddings from N(0, 0.02^2) stay so; a decoder's output of unit variance has unit variance before the output."""
    torch.manual_seed(0)
    config = VanillaTrmConfig(vocab_size=1000, d_model=128, d_ff=128, num_attention_heads=4, embedding_size=32)
    model = VanillaTrmForConditionalGeneration(config)
    encoder = model.get_encoder()
    assert encoder.embed_projection(encoder.embed_tokens.weight).std().item() == pytest.approx(0.02, rel=0.1)
    assert model.lm_head_projection(torch.randn(1000, 128)).std().item() == pytest.approx(1, rel=0.1)


def test_a_fresh_shared_model_starts_near_the_loss_of_a_guess():
    for mode in MODES:
        torch.manual_seed(0)
        config = VanillaTrmConfig(vocab_size=1000, d_model=64, d_ff=128, num_attention_heads=4, parameter_sharing=mode)
        config.embedding_size = 32
        model = VanillaTrmForConditionalGeneration(config).eval()
        ids = torch.randint(3, 1000, (8, 12))
        assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(math.log(1000), rel=0.1)


# Conversion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SHARING)
@pytest.mark.parametrize("order", ["sequence", "cycle", "cycle_reverse"])
def test_an_unshared_copy_computes_the_same_and_shares_nothing(batch, mode, order):
    model = tiny_model(parameter_sharing=mode, **SIX | {"sharing_order": order}, embedding_size=8, output_bias=True)
    model.generation_config.num_beams = 3
    copied = unshare_parameters(model)
    assert torch.equal(copied(**batch).logits, model(**batch).logits)
    assert copied.config.parameter_sharing == "none"
    assert copied.num_parameters() == formula(copied.config) > model.num_parameters()
    assert copied.generation_config.num_beams == 3
    assert not copied.training
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert model.lm_head.weight.abs().sum() > 0, "the model itself was changed"


@pytest.mark.parametrize("mode", SHARING)
def test_a_shared_copy_holds_the_mean_of_the_layers_that_share(mode):
    model = tiny_model(encoder_layers=6, decoder_layers=6)
    copied = share_parameters(model, mode, num_unique_layers=2, sharing_order="cycle_reverse")
    assert copied.config.parameter_sharing == mode
    weights, shared = model.state_dict(), copied.state_dict()
    groups = {}
    for name, tensor in weights.items():
        groups.setdefault(stored_name(name, mode), []).append(tensor)
    assert groups.keys() == shared.keys()
    for name, tensors in groups.items():
        torch.testing.assert_close(shared[name], sum(tensors) / len(tensors), rtol=1e-6, atol=1e-7)
    assert any(len(tensors) == 3 for tensors in groups.values())


@pytest.mark.parametrize("mode", SHARING)
def test_layers_that_are_equal_already_survive_sharing(batch, mode):
    model = tiny_model(parameter_sharing=mode, **SIX)
    again = share_parameters(unshare_parameters(model), mode, num_unique_layers=2, sharing_order="cycle_reverse")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_other_classes_and_precisions_convert_too():
    encoder = spread_weights(VanillaTrmEncoderModel(tiny_config())).to(torch.bfloat16).train()
    shared = share_parameters(encoder, "all")
    assert type(shared) is VanillaTrmEncoderModel
    assert shared.dtype is torch.bfloat16
    assert shared.training
    with pytest.raises(ValueError, match=r"num_unique_layers \(5\) must divide encoder_layers \(2\)"):
        share_parameters(encoder, "all", num_unique_layers=5)


def test_what_cannot_share_is_refused():
    marian = MarianConfig(vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=1, pad_token_id=1)
    for sizes in ("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings"):
        setattr(marian, sizes, 8)
    marian.encoder_attention_heads = marian.decoder_attention_heads = 2
    with pytest.raises(ValueError, match="a MarianMTModel has no layers of vanilla_trm"):
        share_parameters(MarianMTModel(marian), "all")


def test_converting_draws_no_random_numbers():
    model = tiny_model()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    share_parameters(model, "all")
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("model_class", [VanillaTrmEncoderModel, VanillaTrmForSequenceClassification, VanillaTrmModel])
def test_the_command_keeps_the_class_of_what_it_converts(folder, tmp_path, model_class):
    spread_weights(model_class(tiny_config(vocab_size=270, num_labels=3))).save_pretrained(folder)
    flags = ["--model", str(folder), "--output", str(tmp_path / "out"), "--parameter_sharing", "all"]
    assert main(flags) == 0
    saved, report = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert saved.config.architectures == [model_class.__name__]
    assert len(saved.get_encoder().layers) == 1


@pytest.fixture
def folder(tmp_path):
    """A model with its tokenizer."""
    tokenizer = train_tokenizer(["der hund sieht die katze"] * 3, vocab_size=270)
    tiny_model(vocab_size=len(tokenizer), encoder_layers=4, decoder_layers=4).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_shares_and_unshares_a_folder(folder, tmp_path, capsys):
    shared, unshared = tmp_path / "shared", tmp_path / "unshared"
    flags = ["--parameter_sharing", "all", "--num_unique_layers", "2", "--sharing_order", "cycle"]
    assert main(["--model", str(folder), "--output", str(shared), *flags]) == 0
    assert main(["--model", str(shared), "--output", str(unshared), "--parameter_sharing", "none"]) == 0
    config = json.loads((shared / "config.json").read_text())
    assert (config["parameter_sharing"], config["num_unique_layers"], config["sharing_order"]) == ("all", 2, "cycle")
    models = [AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (shared, unshared)]
    ids = AutoTokenizer.from_pretrained(unshared)(["der hund"], return_tensors="pt").input_ids
    first, second = (model(input_ids=ids, labels=ids).logits for model in models)
    assert torch.equal(first, second)
    sizes = [
        sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values()) for path in (shared, unshared)
    ]
    assert f"{sizes[0]:,}" in capsys.readouterr().out
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--parameter_sharing", "all", "--num_unique_layers", "3"],
            "num_unique_layers (3) must divide encoder_layers",
        ),
        (["--parameter_sharing", "some"], "parameter_sharing ('some') must be one of none, attention, ffn, all"),
        (["--parameter_sharing", "all", "--sharing_order", "zigzag"], "sharing_order ('zigzag') must be one of"),
        (["--parameter_sharing", "all", "--model", "missing"], "missing"),
    ],
)
def test_the_command_refuses_what_cannot_be(folder, tmp_path, capsys, flags, message):
    assert main(["--model", str(folder), "--output", str(tmp_path / "out"), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_runs(folder, tmp_path):
    flags = ["--model", folder, "--output", tmp_path / "out", "--parameter_sharing", "ffn"]
    run([*PYTHON, "training.convert_sharing", *flags])
    assert (tmp_path / "out" / "model.safetensors").exists()


# Strangers ---------------------------------------------------------------------------------------------------------

STRANGER = """
import sys
sys.modules["hf_vanilla_trm"] = None  # importing it fails
import torch
from transformers import AutoModelForSeq2SeqLM

model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
batch = torch.load(sys.argv[1] + "/batch.pt")
assert torch.equal(model(**batch["inputs"]).logits, batch["logits"])
assert torch.equal(model.generate(batch["inputs"]["input_ids"], num_beams=2, max_new_tokens=6), batch["generated"])
model.save_pretrained(sys.argv[1] + "/again")
del sys.modules["hf_vanilla_trm"]
sys.path.insert(0, sys.argv[2])
from hf_vanilla_trm import unshare_parameters

# The package converts a model of classes that are not its own.
assert torch.equal(unshare_parameters(model)(**batch["inputs"]).logits, batch["logits"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", SHARING)
def test_a_stranger_loads_a_shared_model_without_the_package(tmp_path, batch, mode):
    model = tiny_model(parameter_sharing=mode, embedding_size=8, **SIX)
    model.save_pretrained(tmp_path)
    generated = model.generate(batch["input_ids"], num_beams=2, max_new_tokens=6)
    torch.save({"inputs": batch, "logits": model(**batch).logits, "generated": generated}, tmp_path / "batch.pt")
    subprocess.run([sys.executable, "-c", STRANGER, str(tmp_path), str(CLONE)], cwd=tmp_path, check=True)
    saved, again = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "again"))
    assert saved.keys() == again.keys()
