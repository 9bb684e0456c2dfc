"""The models: saving and loading, ties, masks, caches, generation, outputs, resizing, checkpointing."""

import copy
import importlib.util
import io
import math
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding, DynamicCache
from transformers.utils.generic import find_labels

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration, VanillaTrmModel
from tests.conftest import spread_weights, tiny_config, tiny_model

TIES = [
    pytest.param({}, id="three-way tie"),
    pytest.param({"tie_word_embeddings": False}, id="output untied"),
    pytest.param({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25}, id="separate vocabularies"),
    pytest.param(
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25, "tie_word_embeddings": False},
        id="separate vocabularies, output untied",
    ),
]
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25}
SHARING = [
    pytest.param({"parameter_sharing": "all", "embedding_size": 12}, id="all shared, factorised"),
    pytest.param({"parameter_sharing": "attention"}, id="attention shared"),
    pytest.param({"parameter_sharing": "ffn", "embedding_size": 12} | SEPARATE, id="ffn shared, separate, factorised"),
]
VARIANTS = [*TIES, *SHARING]


def paper_positions(length, d_model):
    """Section 3.5 by Python's own arithmetic, `(length, d_model)` in float64."""
    return torch.tensor(
        [
            [
                (math.sin, math.cos)[feature % 2](position / 10000 ** (2 * (feature // 2) / d_model))
                for feature in range(d_model)
            ]
            for position in range(length)
        ],
        dtype=torch.float64,
    )


def number_weights(model):
    """Number the elements of all parameters through: no two tensors are alike, and no two rows."""
    first = 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(first, first + parameter.numel()).view_as(parameter))
            first += parameter.numel()
    return model


def closed_formula_count(d_model, d_ff, layers, vocab_size):
    """Parameters without attention biases and with the three-way tie, by the paper's shapes."""
    attention, norm = 4 * d_model**2, 2 * d_model
    feed_forward = 2 * d_model * d_ff + d_ff + d_model
    return vocab_size * d_model + layers * (3 * attention + 2 * feed_forward + 5 * norm)


@pytest.mark.parametrize(
    ("d_model", "d_ff", "layers", "vocab_size", "count"),
    [
        (128, 256, 4, 9712, 2_562_048),
        (256, 1024, 4, 9712, 9_846_784),
        (512, 2048, 6, 37000, 63_045_632),
        (1024, 4096, 6, 37000, 214_171_648),
    ],
)
def test_the_number_of_parameters_is_the_closed_formula(d_model, d_ff, layers, vocab_size, count):
    config = VanillaTrmConfig(
        d_model=d_model, d_ff=d_ff, encoder_layers=layers, decoder_layers=layers, vocab_size=vocab_size
    )
    with torch.device("meta"):
        model = VanillaTrmForConditionalGeneration(config)
    assert model.num_parameters() == count == closed_formula_count(d_model, d_ff, layers, vocab_size)


@pytest.mark.parametrize(("dtype", "shard_size"), [(torch.float32, "50GB"), (torch.bfloat16, "4KB")])
@pytest.mark.parametrize("changes", VARIANTS)
def test_saved_tensors_come_back_bit_for_bit_by_class_and_by_auto_class(tmp_path, changes, dtype, shard_size):
    config = tiny_config(**changes, attention_bias=True, output_bias=True)
    model = number_weights(VanillaTrmForConditionalGeneration(config).to(dtype))
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "50GB")
    expected = model.state_dict()
    for loader in (VanillaTrmForConditionalGeneration, AutoModelForSeq2SeqLM):
        loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is VanillaTrmForConditionalGeneration
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert loaded.state_dict().keys() == expected.keys()
        for name, tensor in loaded.state_dict().items():
            assert tensor.dtype == dtype, name
            assert torch.equal(tensor, expected[name]), name
    bare = AutoModel.from_pretrained(tmp_path)
    assert type(bare) is VanillaTrmModel
    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in bare.state_dict().items())


@pytest.mark.parametrize("lacking", ["bias", "layer_norm.weight", "fc1.weight"])
def test_only_what_a_checkpoint_lacks_is_drawn_anew(tmp_path, lacking):
    """A module of which a part was loaded is initialised again: only guarded writes leave the loaded part alone."""
    model = number_weights(VanillaTrmForConditionalGeneration(tiny_config(attention_bias=True, output_bias=True)))
    model.save_pretrained(tmp_path)
    path, expected = tmp_path / "model.safetensors", model.state_dict()
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(lacking)}
    save_file(kept, path, metadata={"format": "pt"})
    loaded, report = VanillaTrmForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {name for name in expected if name.endswith(lacking)} != set()
    for name, tensor in loaded.state_dict().items():
        if not name.endswith(lacking):
            assert torch.equal(tensor, expected[name]), name
        elif lacking == "fc1.weight":
            assert 0 < tensor.abs().max().item() < 0.2
        else:
            assert (tensor == (0 if lacking == "bias" else 1)).all(), name


def test_a_head_is_drawn_for_a_checkpoint_without_one_and_the_rest_is_kept(tmp_path):
    bare = number_weights(VanillaTrmModel(tiny_config(tie_word_embeddings=False)))
    bare.save_pretrained(tmp_path)
    whole, report = VanillaTrmForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {"lm_head.weight"}
    assert 0 < whole.lm_head.weight.abs().max().item() < 0.2
    expected = bare.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.model.state_dict().items())


@pytest.mark.parametrize("changes", VARIANTS)
def test_each_unique_tensor_is_saved_once_and_ties_survive(tmp_path, changes):
    model = tiny_model(**changes)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a dict
        assert not any("embed_positions" in name for name in file.keys())  # noqa: SIM118
    assert saved == sum(parameter.numel() for parameter in model.parameters()) == model.num_parameters()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    for candidate in (model, loaded):
        encoder, decoder = candidate.model.encoder.embed_tokens.weight, candidate.model.decoder.embed_tokens.weight
        assert (encoder is decoder) == changes.get("share_encoder_decoder_embeddings", True)
        assert (candidate.lm_head.weight is decoder) == changes.get("tie_word_embeddings", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_position_table_is_the_formula_after_every_way_of_loading(tmp_path, dtype):
    tiny_model().to(dtype).save_pretrained(tmp_path)
    with torch.device("meta"):
        on_meta = VanillaTrmForConditionalGeneration(tiny_config())
    on_meta.to_empty(device="cpu").init_weights()
    ways = {
        "class": VanillaTrmForConditionalGeneration.from_pretrained(tmp_path).model,
        "Auto class": AutoModelForSeq2SeqLM.from_pretrained(tmp_path).model,
        "another dtype": AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float16).model,
        "device map": AutoModelForSeq2SeqLM.from_pretrained(tmp_path, device_map="cpu").model,
        "without head": AutoModel.from_pretrained(tmp_path),
        "encoder alone": AutoModelForTextEncoding.from_pretrained(tmp_path),
        "from config": AutoModelForSeq2SeqLM.from_config(tiny_config(), dtype=dtype).model,
        "meta device": on_meta.model,
    }
    expected = paper_positions(40, 16)
    for way, model in ways.items():
        stacks = [model.encoder] if way == "encoder alone" else [model.encoder, model.decoder]
        for stack in stacks:
            table = stack.embed_positions.table
            torch.testing.assert_close(table.double(), expected, rtol=0, atol=1e-6, msg=way)
            for half in (torch.bfloat16, torch.float16):
                cast = copy.deepcopy(stack).to(half).embed_positions.table
                torch.testing.assert_close(cast, expected.to(half), rtol=2**-7, atol=1e-6, msg=way)
            assert stack.to("meta").embed_positions.table.device.type == "meta"


@pytest.mark.parametrize("table_length", [2048, 100], ids=["in the table", "beyond the table"])
def test_positions_up_to_2047_are_exact_before_they_are_cast_to_bf16(tmp_path, table_length):
    config = tiny_config(max_position_embeddings=table_length)
    tiny_model(max_position_embeddings=table_length).to(torch.bfloat16).save_pretrained(tmp_path)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        under_default = VanillaTrmForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(default)
    ways = [
        VanillaTrmForConditionalGeneration(config).to(torch.bfloat16),
        VanillaTrmForConditionalGeneration.from_pretrained(tmp_path),
        AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16),
        under_default,
    ]
    expected = paper_positions(2048, 16).to(torch.bfloat16)
    for model in ways:
        stack = model.get_decoder()
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                seen = stack.add_positions(torch.zeros(1, 2048, 16, dtype=torch.bfloat16), torch.arange(2048), 2048)[0]
            assert seen.dtype == torch.bfloat16
            # In bf16 neighbouring positions beyond 256 would be one number; half a unit of rounding is 2^-9.
            torch.testing.assert_close(seen, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(("key", "length"), [("table", 40), ("table", 12), ("weight", 40)])
def test_an_old_file_with_a_saved_position_table_still_loads_and_its_table_is_not_used(tmp_path, batch, key, length):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stale = {f"model.{stack}.embed_positions.{key}": torch.full((length, 16), 9.0) for stack in ("encoder", "decoder")}
    save_file(load_file(path) | stale, path, metadata={"format": "pt"})
    for loader in (VanillaTrmForConditionalGeneration, AutoModelForSeq2SeqLM):
        loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"]
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    bare = AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(bare.decoder.embed_positions.table.double(), paper_positions(40, 16), rtol=0, atol=1e-6)


@pytest.mark.parametrize("changes", VARIANTS)
def test_ties_are_a_mapping_and_leave_no_parameter_without_a_use(batch, changes):
    model = tiny_model(**changes)
    names = dict(model.named_parameters(remove_duplicate=False))
    for module in (model, model.model):
        assert isinstance(module._tied_weights_keys or {}, dict)
        for alias, source in module.get_expanded_tied_weights_keys().items():
            assert module.get_parameter(alias) is module.get_parameter(source)
    # transformers saves and loads by these: every alias names a parameter, and its source is not an alias itself.
    assert model.all_tied_weights_keys.keys() | set(model.all_tied_weights_keys.values()) <= names.keys()
    assert not model.all_tied_weights_keys.keys() & set(model.all_tied_weights_keys.values())
    aliases = len(names) - len(dict(model.named_parameters()))
    ties = 2 * changes.get("share_encoder_decoder_embeddings", True) + changes.get("tie_word_embeddings", True)
    assert len(model.all_tied_weights_keys) == aliases == ties + ("embedding_size" in changes)
    model(**batch).loss.backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not unused, "a parameter without a gradient breaks DDP and FSDP"


@pytest.mark.parametrize("sizes", [{"d_model": 128, "d_ff": 256, "num_attention_heads": 4}, {}], ids=["tiny", "base"])
def test_a_fresh_model_predicts_close_to_uniformly(sizes):
    torch.manual_seed(0)
    config = VanillaTrmConfig(vocab_size=8000, dropout=0.0, **sizes)
    source, target = torch.randint(3, 8000, (2, 3, 19))
    loss = VanillaTrmForConditionalGeneration(config)(input_ids=source, labels=target).loss
    assert loss.item() == pytest.approx(math.log(8000), rel=0.1)


def gradients(model, loss):
    """Of all parameters of `model`, by name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_any_source_token_harms_neither_itself_nor_the_others(batch, implementation, dtype):
    model = tiny_model().to(dtype)
    model.set_attn_implementation(implementation)
    others = torch.tensor([0, 2])
    expected = model(**batch).logits[others]
    whole_loss = model(**batch).loss
    batch["attention_mask"][1] = 0
    outputs = model(**batch)
    assert outputs.logits.isfinite().all()
    assert outputs.encoder_last_hidden_state.isfinite().all()
    # The same width and the same number of rows: not even the order of a sum may differ.
    assert torch.equal(outputs.logits[others], expected)
    assert not torch.equal(outputs.loss, whole_loss), "the mask had no effect"
    for training in (False, True):
        loss = model.train(training)(**batch, label_smoothing=0.1).loss
        assert all(gradient.isfinite().all() for gradient in gradients(model, loss).values())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_any_token_leaves_the_gradient_of_the_others(batch, implementation, dtype):
    model = tiny_model().to(dtype).train()
    model.set_attn_implementation(implementation)
    batch["labels"][1] = -100
    expected = gradients(model, model(**batch).loss)
    batch["attention_mask"][1] = 0
    for name, gradient in gradients(model, model(**batch).loss).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [slice(None), slice(0, 2)], ids=["no target token", "targets padded on the left"])
def test_a_target_position_that_may_attend_to_nothing_harms_nobody(batch, implementation, dtype, hidden):
    model = tiny_model().to(dtype)
    model.set_attn_implementation(implementation)
    others = torch.tensor([0, 2])
    decoder_mask = torch.ones(3, 5, dtype=torch.long)
    expected = model(**batch, decoder_attention_mask=decoder_mask).logits[others]
    decoder_mask[1, hidden] = 0
    outputs = model(**batch, decoder_attention_mask=decoder_mask)
    assert outputs.logits.isfinite().all()
    assert torch.equal(outputs.logits[others], expected)
    assert all(gradient.isfinite().all() for gradient in gradients(model, outputs.loss).values())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_sources_that_are_all_empty_give_finite_logits_gradients_and_translations(batch, implementation):
    model = tiny_model(seed=7)
    model.set_attn_implementation(implementation)
    source = {"input_ids": batch["input_ids"], "attention_mask": torch.zeros(3, 7, dtype=torch.long)}
    outputs = model(**source, labels=batch["labels"])
    assert outputs.logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model, outputs.loss).values())
    for num_beams in (1, 3):
        assert model.generate(**source, max_new_tokens=4, num_beams=num_beams).size(0) == 3


@pytest.mark.slow  # flex attention is compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in torch and in transformers
@torch.no_grad()  # it has no backward on a CPU
def test_eager_sdpa_and_flex_attention_give_the_same_logits(batch):
    model, logits = tiny_model(), []
    for implementation in ("eager", "sdpa", "flex_attention"):
        model.set_attn_implementation(implementation)
        logits.append(model(**batch).logits)
    for others in logits[1:]:
        torch.testing.assert_close(others, logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash attention is installed")
def test_flash_attention_without_its_package_is_a_clear_error():
    with pytest.raises(ImportError, match="FlashAttention2"):
        tiny_model().set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_sentence_has_the_same_logits_alone_and_padded_beside_a_longer_one(batch, implementation):
    model = tiny_model()
    model.set_attn_implementation(implementation)
    together = model(**batch).logits
    for row, (source_length, target_length) in enumerate(((7, 5), (4, 2), (6, 4))):
        row_ids, row_labels = batch["input_ids"][row : row + 1], batch["labels"][row : row + 1, :target_length]
        alone = model(input_ids=row_ids[:, :source_length], labels=row_labels).logits
        torch.testing.assert_close(together[row : row + 1, :target_length], alone, rtol=0, atol=1e-5)
        wider = torch.nn.functional.pad(row_ids, (0, 30), value=1)
        mask = (torch.arange(37) < source_length).long().unsqueeze(0)
        padded = model(input_ids=wider, attention_mask=mask, labels=row_labels).logits
        torch.testing.assert_close(padded, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_sentence_decodes_alike_alone_and_padded_beside_a_longer_one(batch, implementation, num_beams):
    model = tiny_model(seed=13)
    model.set_attn_implementation(implementation)
    del batch["labels"]
    settings = {"max_new_tokens": 8, "num_beams": num_beams, "return_dict_in_generate": True, "output_scores": True}
    together = model.generate(**batch, **settings)
    encoded = model.get_encoder()(**batch)
    given = model.generate(encoder_outputs=encoded, attention_mask=batch["attention_mask"], **settings)
    assert given.sequences.tolist() == together.sequences.tolist()
    for row, source_length in enumerate((7, 4, 6)):
        alone = {name: tensor[row : row + 1, :source_length] for name, tensor in batch.items()}
        encoded = model.get_encoder()(**alone)
        passed_on = {"encoder_outputs": encoded, "attention_mask": alone["attention_mask"]}
        for inputs in (alone, {"input_ids": alone["input_ids"]}, passed_on):
            expected = model.generate(**inputs, **settings)
            length = expected.sequences.size(1)
            assert together.sequences[row, :length].tolist() == expected.sequences[0].tolist()
            assert (together.sequences[row, length:] == model.config.pad_token_id).all()
            if num_beams > 1:
                torch.testing.assert_close(
                    together.sequences_scores[row], expected.sequences_scores[0], rtol=0, atol=1e-5
                )
    assert len({tuple(sequence.tolist()) for sequence in together.sequences}) == 3, "a weak test"


def swaps(beam_indices):
    """How often a hypothesis goes on from another beam than the one it stood on; -1 is past its end."""
    before, after = beam_indices[:, :-1], beam_indices[:, 1:]
    return ((before != after) & (after >= 0)).sum().item()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1, "do_sample": False},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_beams": 4, "length_penalty": 0.6},
        {"do_sample": True},
        {"do_sample": True, "num_beams": 3},
    ],
    ids=["greedy", "beam", "beam with a length penalty", "sampling", "sampling beams"],
)
@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_generation_is_the_same_with_and_without_a_cache(batch, settings, cache_implementation):
    model = tiny_model(seed=7, decoder_layers=3)
    batch["attention_mask"][1] = 0  # one source has no token at all
    del batch["labels"]
    settings = settings | {"max_new_tokens": 9, "return_dict_in_generate": True}
    results = []
    for cache in ({"cache_implementation": cache_implementation}, {"use_cache": False}):
        torch.manual_seed(0)
        results.append(model.generate(**batch, **settings, **cache, output_logits=True, output_scores=True))
    cached, uncached = results
    assert cached.sequences.tolist() == uncached.sequences.tolist()
    assert cached.cache is not None
    assert uncached.cache is None
    for kind in ("logits", "scores"):
        torch.testing.assert_close(torch.stack(cached[kind]), torch.stack(uncached[kind]), rtol=0, atol=1e-5)
    if settings.get("num_beams", 1) > 1:
        torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores, rtol=0, atol=1e-5)
        assert torch.equal(cached.beam_indices, uncached.beam_indices)
        assert swaps(cached.beam_indices) > 0, "beams that never swap would be a weak test"


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("source_length", [5, 6, 7, 11])
def test_sources_and_outputs_may_be_longer_than_the_position_table(num_beams, source_length):
    lengths = {"max_new_tokens": 13, "num_beams": num_beams, "do_sample": False}
    source = torch.randint(3, 20, (2, source_length), generator=torch.Generator().manual_seed(0))
    recorded = {"return_dict_in_generate": True, "output_logits": True}
    longer_table = tiny_model(seed=7, max_position_embeddings=50, eos_token_id=None)
    expected = longer_table.generate(source, **lengths, **recorded)
    assert expected.sequences.shape == (2, 14)
    model = tiny_model(seed=7, max_position_embeddings=6, eos_token_id=None)
    for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        actual = model.generate(source, **lengths, **recorded, **cache)
        assert actual.sequences.tolist() == expected.sequences.tolist()
        # One entry for each position: both sides of the boundary are compared.
        torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table_length", [1, 4, 5, 6, 7])
def test_a_short_position_table_changes_no_logits(batch, table_length, dtype):
    """Sources of 7 and targets of 5: shorter than the table, as long, and longer."""
    model, expected = tiny_model(max_position_embeddings=table_length).to(dtype), tiny_model().to(dtype)
    torch.testing.assert_close(
        model(**batch).logits, expected(**batch).logits, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1
    )


@pytest.mark.parametrize("training", [False, True])
def test_holes_in_the_labels_are_padding_for_the_decoder_and_no_part_of_the_loss(batch, training):
    model = tiny_model(pad_token_id=1, decoder_start_token_id=0).train(training)
    labels, source = torch.tensor([[5, -100, 7, 2, -100]]), batch["input_ids"][:1]
    seen = []
    model.get_decoder().embed_tokens.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    loss = model(source, labels=labels).loss
    assert seen[0].tolist() == [[0, 5, 1, 7, 2]]
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[0, 5, 1, 7, 2]]
    log_probs = model(source, decoder_input_ids=seen[0]).logits[0].log_softmax(-1)
    expected = -(log_probs[0, 5] + log_probs[2, 7] + log_probs[3, 2]) / 3
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


DECODING = [{"num_beams": 1}, {"num_beams": 3}, {"do_sample": True}, {"use_cache": False}]


@pytest.mark.parametrize("start", [0, 4])
def test_training_and_decoding_begin_with_the_start_token(tmp_path, batch, start):
    model = tiny_model(decoder_start_token_id=start, bos_token_id=6)
    model.save_pretrained(tmp_path)
    for candidate in (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        first = []
        candidate.get_decoder().embed_tokens.register_forward_hook(
            lambda _module, inputs, _output, first=first: first.append(inputs[0][:, 0].tolist())
        )
        candidate(**batch)
        for settings in DECODING:
            output = candidate.generate(batch["input_ids"], max_new_tokens=2, **settings)
            assert output[:, 0].tolist() == [start] * 3
            assert set(first.pop(1)) == {start}
            del first[1:]
        assert first == [[start] * 3]


@pytest.mark.parametrize("bos_token_id", [None, 0])
@pytest.mark.parametrize("settings", DECODING)
def test_decoding_without_a_start_token_is_a_clear_error(batch, bos_token_id, settings):
    model = tiny_model(decoder_start_token_id=None, bos_token_id=bos_token_id)
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        model.generate(batch["input_ids"], max_new_tokens=2, **settings)
    given = model.generate(batch["input_ids"], max_new_tokens=2, decoder_start_token_id=4, **settings)
    assert given[:, 0].tolist() == [4, 4, 4]


def test_a_start_token_set_late_is_the_first_of_decoding_too_or_refused(tmp_path, batch):
    tiny_model(decoder_start_token_id=4).save_pretrained(tmp_path)
    late = tiny_model(decoder_start_token_id=4)
    late.config.decoder_start_token_id = 5
    for model in (late, AutoModelForSeq2SeqLM.from_pretrained(tmp_path, decoder_start_token_id=5)):
        assert model.prepare_decoder_input_ids_from_labels(batch["labels"])[:, 0].tolist() == [5, 5, 5]
        with pytest.raises(ValueError, match=r"config\.decoder_start_token_id \(5\).*\(4\)"):
            model.generate(batch["input_ids"], max_new_tokens=2)
        chosen = model.generate(batch["input_ids"], max_new_tokens=2, decoder_start_token_id=6)
        assert chosen[:, 0].tolist() == [6, 6, 6]
        model.generation_config.decoder_start_token_id = 5
        assert model.generate(batch["input_ids"], max_new_tokens=2)[:, 0].tolist() == [5, 5, 5]


@pytest.mark.parametrize("name", ["decoder_start_token_id", "pad_token_id"])
@pytest.mark.parametrize("training", [False, True])
def test_labels_without_a_start_or_padding_token_are_a_clear_error(batch, name, training):
    model = tiny_model(**{name: None}).train(training)
    with pytest.raises(ValueError, match=rf"config\.{name} is None"):
        model(**batch)
    with pytest.raises(ValueError, match=rf"config\.{name} is None"):
        model.prepare_decoder_input_ids_from_labels(batch["labels"])


def test_decoding_without_an_encoder_output_is_a_clear_error():
    with pytest.raises(ValueError, match="needs encoder_hidden_states"):
        tiny_model().get_decoder()(input_ids=torch.tensor([[0, 5]]))


def test_a_cache_without_room_for_cross_attention_is_a_clear_error(batch):
    with pytest.raises(ValueError, match="must be an EncoderDecoderCache, not DynamicCache"):
        tiny_model()(batch["input_ids"], decoder_input_ids=torch.zeros(3, 1, dtype=torch.long), cache=DynamicCache())


@torch.no_grad()
def test_the_caches_old_name_is_understood_and_not_ignored(batch):
    model = tiny_model()
    first = torch.zeros(3, 1, dtype=torch.long)
    expected = model(batch["input_ids"], decoder_input_ids=first, use_cache=True)
    cached = copy.deepcopy(expected.cache)
    again = {"encoder_outputs": (expected.encoder_last_hidden_state,), "decoder_input_ids": first + 5}
    with pytest.warns(FutureWarning, match="past_key_values.* is deprecated"):
        old = model(**again, past_key_values=cached)
    torch.testing.assert_close(old.logits, model(**again, cache=expected.cache).logits)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1), (2, 3), (1, 3, 1)], ids=str)
def test_masked_training_equals_step_by_step_decoding(batch, implementation, steps):
    model = tiny_model()
    model.set_attn_implementation(implementation)
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    whole = model(**batch).logits
    del batch["labels"]
    cache = None
    pieces = zip(decoder_input_ids.split(steps, dim=1), whole.split(steps, dim=1), strict=True)
    for ids, expected in pieces:
        step = model(**batch, decoder_input_ids=ids, cache=cache, use_cache=True)
        cache = step.cache
        torch.testing.assert_close(step.logits, expected, rtol=1e-5, atol=1e-5)
    assert (len(cache.self_attention_cache), len(cache.cross_attention_cache)) == (2, 2)


def test_without_positions_the_encoder_is_permutation_equivariant(batch):
    encoder = tiny_model().get_encoder()
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    ids = batch["input_ids"][:1]
    with_positions = encoder(ids).last_hidden_state[:, order], encoder(ids[:, order]).last_hidden_state
    assert not torch.allclose(*with_positions, atol=1e-2)
    encoder.embed_positions.table.zero_()
    torch.testing.assert_close(
        encoder(ids).last_hidden_state[:, order], encoder(ids[:, order]).last_hidden_state, rtol=1e-5, atol=1e-5
    )


def test_every_sub_layer_ends_in_its_norm(batch):
    model = tiny_model(encoder_layers=3)
    with torch.no_grad():
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            layer.feed_forward_layer_norm.weight.fill_(1)
            layer.feed_forward_layer_norm.bias.zero_()
    outputs = model(**batch, output_hidden_states=True)
    for states in (*outputs.encoder_hidden_states[1:], *outputs.decoder_hidden_states[1:]):
        torch.testing.assert_close(states.mean(-1), torch.zeros(states.shape[:-1]), rtol=0, atol=1e-5)
        torch.testing.assert_close(states.var(-1, unbiased=False), torch.ones(states.shape[:-1]), rtol=0, atol=1e-3)


def test_hidden_states_and_attentions_have_one_entry_a_layer_and_rows_that_sum_to_one(batch):
    model = tiny_model(decoder_layers=3)
    model.set_attn_implementation("eager")
    outputs = model(**batch, output_hidden_states=True, output_attentions=True)
    assert [states.shape for states in outputs.encoder_hidden_states] == [(3, 7, 16)] * 3
    assert [states.shape for states in outputs.decoder_hidden_states] == [(3, 5, 16)] * 4
    assert [weights.shape for weights in outputs.encoder_attentions] == [(3, 2, 7, 7)] * 2
    assert [weights.shape for weights in outputs.decoder_attentions] == [(3, 2, 5, 5)] * 3
    assert [weights.shape for weights in outputs.cross_attentions] == [(3, 2, 5, 7)] * 3
    for weights in outputs.cross_attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 5))
        assert weights[1, :, :, 4:].count_nonzero() == 0  # padding of the source
    for weights in outputs.decoder_attentions:
        assert weights.triu(1).count_nonzero() == 0  # the future
    torch.testing.assert_close(outputs.decoder_hidden_states[-1] @ model.lm_head.weight.T, outputs.logits)


@torch.no_grad()
def test_hidden_states_are_chosen_by_index_from_either_end_of_both_stacks(batch):
    model = tiny_model(encoder_layers=3, decoder_layers=5)
    every = model(**batch, output_hidden_states=True)
    some = model(**batch, output_hidden_states=[0, -2])
    for stack, kept in (("encoder", {0, 2}), ("decoder", {0, 4})):
        states, chosen = every[f"{stack}_hidden_states"], some[f"{stack}_hidden_states"]
        assert {depth for depth, state in enumerate(chosen) if state is not None} == kept
        assert all(torch.equal(chosen[depth], states[depth]) for depth in kept)


def test_dropout_falls_on_every_sub_layer_output_and_on_the_embeddings():
    model = tiny_model(dropout=0.5)
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {
        name: 0.5
        for stack in ("encoder", "decoder")
        for name in (f"model.{stack}.dropout", *(f"model.{stack}.layers.{depth}.dropout" for depth in range(2)))
    }
    encoder = model.get_encoder().train()
    torch.manual_seed(0)
    seen = []
    encoder.dropout.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    for layer in encoder.layers:
        layer.dropout.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    encoder(torch.tensor([[5, 6, 2]]))
    assert len(seen) == 1 + 2 * 2  # the embeddings, and two sub-layers in each of two layers


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_leaves_loss_and_gradients_unchanged(batch, use_reentrant):
    model = tiny_model(dropout=0.1).train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            assert model.is_activation_checkpointing
        torch.manual_seed(0)
        loss = model(**batch, label_smoothing=0.1).loss
        model.zero_grad()
        loss.backward()
        results.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def train_one_step(model, batch):
    """One update in training mode, where the loss is chunked; the loss is checked against that of the logits."""
    logits = model.eval()(**batch).logits
    real = batch["labels"] != -100
    expected = torch.nn.functional.cross_entropy(logits[real], batch["labels"][real])
    outputs = model.train()(**batch)
    assert model._can_chunk_loss(), "else training would hold all logits"
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-5, atol=1e-6)
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    assert model.eval()(**batch).loss.item() < expected.item()


def assert_reloads_alike(model, folder, batch):
    model.save_pretrained(folder)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert loaded.config.decoder_vocab_size == model.config.decoder_vocab_size == loaded.lm_head.out_features
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("size", [23, 18])
@pytest.mark.parametrize("mean_resizing", [True, False])
def test_resizing_a_shared_vocabulary_resizes_everything_and_keeps_the_rest(
    tmp_path, batch, size, tie_word_embeddings, mean_resizing
):
    model = tiny_model(tie_word_embeddings=tie_word_embeddings, output_bias=True)
    kept, before = min(size, 20), copy.deepcopy(model.state_dict())
    model.resize_token_embeddings(size, mean_resizing=mean_resizing)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (size, size)
    assert model.lm_head.out_features == model.get_input_embeddings().num_embeddings == size
    for name, tensor in model.state_dict().items():
        resized = name.startswith("lm_head") or "embed_tokens" in name or "shared" in name
        assert tensor.size(0) == (size if resized else before[name].size(0)), name
        assert torch.equal(tensor[:kept], before[name][:kept]) if resized else torch.equal(tensor, before[name]), name
        assert tensor.isfinite().all()

    def assert_ties():
        embeddings = model.model.shared, model.model.encoder.embed_tokens, model.model.decoder.embed_tokens
        assert len({id(embedding.weight) for embedding in embeddings}) == 1
        assert (model.lm_head.weight is model.model.shared.weight) == tie_word_embeddings

    assert_ties()
    batch = {name: tensor.clamp(max=17) for name, tensor in batch.items()}
    batch["input_ids"][0, 0] = batch["labels"][0, 0] = size - 1
    assert model(**batch).logits.shape == (3, 5, size)
    assert model.generate(batch["input_ids"], max_new_tokens=3, num_beams=2).max().item() < size
    train_one_step(model, batch)
    assert_ties()
    assert_reloads_alike(model, tmp_path, batch)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_a_vocabulary_padded_to_a_multiple_is_as_wide_everywhere(tmp_path, batch, tie_word_embeddings):
    model = tiny_model(tie_word_embeddings=tie_word_embeddings)
    model.resize_token_embeddings(pad_to_multiple_of=8)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (24, 24)
    assert model(**batch).logits.shape == (3, 5, 24)
    train_one_step(model, batch)
    assert_reloads_alike(model, tmp_path, batch)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("decoder_vocab_size", [25, 20], ids=["other sizes", "the same size"])
@pytest.mark.parametrize("change", [3, -2])
def test_separate_vocabularies_are_resized_separately(tmp_path, batch, tie_word_embeddings, decoder_vocab_size, change):
    separate = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": decoder_vocab_size}
    model = tiny_model(**separate, tie_word_embeddings=tie_word_embeddings, output_bias=True)
    batch = {name: tensor.clamp(max=17) for name, tensor in batch.items()}
    source, target = 20, decoder_vocab_size
    for resize_source in (True, False):
        before = copy.deepcopy(model.state_dict())
        if resize_source:
            source += change
            model.resize_token_embeddings(source)
        else:
            target += change
            model.resize_decoder_token_embeddings(target)
        assert (model.config.vocab_size, model.config.decoder_vocab_size) == (source, target)
        encoder, decoder = model.model.encoder.embed_tokens, model.model.decoder.embed_tokens
        assert (encoder.num_embeddings, encoder.weight.size(0)) == (source, source)
        assert (decoder.num_embeddings, decoder.weight.size(0)) == (target, target)
        assert (model.lm_head.out_features, model.lm_head.weight.size(0)) == (target, target)
        assert (model.lm_head.weight is decoder.weight) == tie_word_embeddings
        assert encoder.weight is not decoder.weight
        for name, tensor in model.state_dict().items():
            kept = min(tensor.size(0), before[name].size(0))
            assert torch.equal(tensor[:kept], before[name][:kept]), name
        assert model(**batch).logits.shape == (3, 5, target)
        train_one_step(model, batch)
        assert_reloads_alike(model, tmp_path, batch)
    with pytest.raises(ValueError, match="call resize_token_embeddings instead"):
        tiny_model().resize_decoder_token_embeddings(27)


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_model_without_a_head_is_resized_like_one_with_a_head(tmp_path, batch, changes):
    model = spread_weights(VanillaTrmModel(tiny_config(**changes))).eval()
    shared = changes.get("share_encoder_decoder_embeddings", True)
    before = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(23)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (23, 23 if shared else 25)
    assert (model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight) == shared
    assert torch.equal(model.get_input_embeddings().weight[:20], before)
    model.save_pretrained(tmp_path)
    inputs = {"input_ids": torch.tensor([[22, 5, 2]]), "decoder_input_ids": torch.tensor([[0, 22 if shared else 24]])}
    expected = model(**inputs).last_hidden_state
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(**inputs).last_hidden_state, expected)


def test_the_trainer_takes_the_labels_and_nothing_else_for_labels():
    assert find_labels(VanillaTrmForConditionalGeneration) == ["labels"]


def test_a_vocabulary_resized_in_the_config_is_resized_on_both_sides(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(tmp_path, vocab_size=30))
    assert model.lm_head.weight.shape == model.model.decoder.embed_tokens.weight.shape == (30, 16)
    assert (model.lm_head.out_features, model.config.decoder_vocab_size) == (30, 30)
    model.save_pretrained(tmp_path)


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("changes", VARIANTS)
def test_copies_and_pickles_compute_the_same_and_share_nothing_with_the_original(tmp_path, batch, make_copy, changes):
    model = tiny_model(**changes, max_position_embeddings=6)
    model.save_pretrained(tmp_path)
    for original in (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        expected, twin = original(**batch).logits, make_copy(original)
        assert torch.equal(twin(**batch).logits, expected)
        tied = changes.get("tie_word_embeddings", True)
        assert (twin.lm_head.weight is twin.model.decoder.embed_tokens.weight) == tied
        assert twin.num_parameters() == original.num_parameters()
        with torch.no_grad():
            for tensor in (*twin.parameters(), *twin.buffers()):
                tensor.add_(1)
        assert torch.equal(original(**batch).logits, expected)


def test_embeddings_may_be_given_in_place_of_ids(batch):
    model = tiny_model()
    expected = model(**batch).logits
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    embed = model.get_input_embeddings()
    given = model(
        inputs_embeds=embed(batch["input_ids"]),
        attention_mask=batch["attention_mask"],
        decoder_inputs_embeds=embed(decoder_input_ids),
    )
    torch.testing.assert_close(given.logits, expected)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(input_ids=batch["input_ids"], inputs_embeds=embed(batch["input_ids"]), labels=batch["labels"])


def test_a_tuple_is_returned_on_request_and_accepted_as_encoder_output(batch):
    model = tiny_model()
    expected = model(**batch)
    as_tuple = model(**batch, return_dict=False)
    torch.testing.assert_close(as_tuple[0], expected.loss)
    torch.testing.assert_close(as_tuple[1], expected.logits)
    encoder_outputs = (model.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state,)
    given = model(encoder_outputs=encoder_outputs, attention_mask=batch["attention_mask"], labels=batch["labels"])
    torch.testing.assert_close(given.logits, expected.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"])
@pytest.mark.parametrize("std", [0.3, 2.0], ids=["usual weights", "large weights"])
def test_half_precision_is_finite_and_masks_to_exactly_zero(batch, dtype, std):
    model = spread_weights(tiny_model(), std=std).to(torch.float32 if dtype == "autocast" else dtype)
    model.set_attn_implementation("eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        outputs = model(**batch, output_attentions=True)
    assert outputs.logits.isfinite().all()
    assert outputs.loss.isfinite()
    for weights in (*outputs.encoder_attentions, *outputs.cross_attentions):
        assert weights[1, :, :, 4:].count_nonzero() == 0
        assert weights[2, :, :, 6:].count_nonzero() == 0
        assert weights.isfinite().all()
    assert all(weights.triu(1).count_nonzero() == 0 for weights in outputs.decoder_attentions)
    assert all(weights.isfinite().all() for weights in outputs.decoder_attentions)
    assert all(gradient.isfinite().all() for gradient in gradients(model, outputs.loss).values())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_and_the_future_have_no_influence_at_all(batch, implementation, dtype):
    model = tiny_model().to(dtype)
    model.set_attn_implementation(implementation)
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
    expected = model(**batch, decoder_input_ids=decoder_input_ids).logits
    otherwise = batch["input_ids"].clone()
    otherwise[batch["attention_mask"] == 0] = 9
    assert not torch.equal(otherwise, batch["input_ids"])
    given = {"attention_mask": batch["attention_mask"], "decoder_input_ids": decoder_input_ids}
    assert torch.equal(model(otherwise, **given).logits, expected)
    for position in range(1, 5):
        later = decoder_input_ids.clone()
        later[:, position:] = (later[:, position:] + 7) % 20
        logits = model(**batch, decoder_input_ids=later).logits
        assert torch.equal(logits[:, :position], expected[:, :position])
        assert not torch.equal(logits[:, position], expected[:, position])


def test_auto_config_knows_the_model_type():
    assert type(AutoConfig.for_model("vanilla_trm")) is VanillaTrmConfig
    assert spread_weights(AutoModel.from_config(tiny_config())).config.model_type == "vanilla_trm"
