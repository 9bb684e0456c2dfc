"""Conversion from and to MarianMT, and from torch's layers, which compute the same in code that is not ours."""

import pytest
import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from hf_vanilla_trm import (
    VanillaTrmDecoder,
    VanillaTrmEncoder,
    VanillaTrmEncoderModel,
    custom_generate,
    from_marian,
    load_torch_weights,
    saved_options,
    to_marian,
)
from hf_vanilla_trm.generation import search
from tests.conftest import tiny_config, tiny_model

CASES = [
    pytest.param({}, id="as in the paper"),
    pytest.param({"attention_bias": True, "decoder_layers": 3}, id="attention bias, unequal depths"),
    pytest.param({"output_bias": True, "scale_embedding": False}, id="output bias, embeddings as they are"),
    pytest.param({"activation_function": "gelu"}, id="another activation"),
    pytest.param({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30}, id="two vocabularies"),
    pytest.param({"tie_word_embeddings": False}, id="output untied"),
    pytest.param({"parameter_sharing": "all"}, id="all shared"),
    pytest.param(
        {"parameter_sharing": "attention", "encoder_layers": 4, "num_unique_layers": 2, "sharing_order": "cycle"},
        id="attention shared",
    ),
    pytest.param({"parameter_sharing": "ffn"}, id="feed-forward networks shared"),
]


def logits_of(model, batch, decoder_input_ids):
    sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model(**sources, decoder_input_ids=decoder_input_ids).logits


@pytest.mark.parametrize("changes", CASES)
def test_marian_gives_the_same_logits(batch, changes):
    model = tiny_model(**changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    random_state = torch.get_rng_state()
    marian = to_marian(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.testing.assert_close(logits_of(marian, batch, inputs), logits_of(model, batch, inputs), rtol=1e-5, atol=1e-5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_saved_marian_gives_the_same_logits_also_beyond_the_positions_of_the_model(tmp_path):
    model = tiny_model(max_position_embeddings=10, parameter_sharing="all")
    to_marian(model, max_position_embeddings=33).save_pretrained(tmp_path)
    tokens = torch.randint(3, 20, (2, 33), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    loaded = MarianMTModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded, batch, tokens), logits_of(model, batch, tokens), rtol=1e-5, atol=1e-5)


def test_precision_is_kept(batch):
    """In float64 the positions of both, computed in float32, are the only rounding."""
    model = tiny_model().double()
    inputs = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    logits = logits_of(to_marian(model), batch, inputs)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, logits_of(model, batch, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_marian_generates_the_same_tokens_behind_our_start_token(batch, num_beams):
    model = tiny_model(seed=7, decoder_start_token_id=5)
    del batch["labels"]
    settings = {"num_beams": num_beams, "max_new_tokens": 9, "do_sample": False}
    ours = model.generate(**batch, **settings).tolist()
    assert to_marian(model).generate(**batch, **settings).tolist() == ours
    assert {row[0] for row in ours} == {5}
    assert len(set(map(tuple, ours))) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_size": 8}, r"embedding_size \(8\) must be d_model \(16\)"),
        ({"layer_norm_eps": 1e-6}, r"layer_norm_eps \(1e-06\) must be 1e-05"),
        ({"eos_token_id": [2, 3]}, r"eos_token_id \(\[2, 3\]\) must be one token"),
        ({"decoder_start_token_id": None}, r"decoder_start_token_id \(None\) must be one token"),
    ],
)
def test_what_marian_cannot_be_is_refused_by_field_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        to_marian(tiny_model(**changes))


def test_a_model_of_another_type_is_refused():
    with pytest.raises(ValueError, match="a MarianMTModel of type marian cannot become a MarianMT"):
        to_marian(to_marian(tiny_model()))
    with pytest.raises(ValueError, match="a VanillaTrmEncoderModel of type vanilla_trm cannot"):
        to_marian(VanillaTrmEncoderModel(tiny_config()))


# From Marian --------------------------------------------------------------------------------------------------------

PAD = 19


def tiny_marian(seed=0, **changes):
    """A MarianMT with random weights and biases; as the published ones, it begins with its pad token."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": 20,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 40,
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": PAD,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "decoder_start_token_id": PAD,
    }
    model = MarianMTModel(MarianConfig(**fields | changes)).eval()
    for name, parameter in model.named_parameters():
        if "embed_positions" not in name:
            is_norm = name.endswith("layer_norm.weight")
            nn.init.normal_(parameter, mean=float(is_norm), std=0.5 if "embed" in name or "shared" in name else 0.2)
    nn.init.normal_(model.final_logits_bias, std=0.3)
    model.generation_config.bad_words_ids = [[PAD]]
    model.generation_config.max_length = 12
    return model


MARIANS = [
    pytest.param({}, id="as published"),
    pytest.param({"activation_function": "relu", "scale_embedding": False}, id="relu, embeddings as they are"),
    pytest.param({"activation_function": "gelu", "d_model": 12}, id="gelu"),
    pytest.param({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 33}, id="two vocabularies"),
    pytest.param(
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 33, "tie_word_embeddings": False},
        id="two vocabularies, output untied",
    ),
    pytest.param({"tie_word_embeddings": False}, id="output untied"),
]


@pytest.fixture
def sources():
    """Three sources of Marian's, 7, 5 and 2 tokens long."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, PAD, (3, 7), generator=generator)
    mask = torch.arange(7) < torch.tensor([[7], [5], [2]])
    return {"input_ids": input_ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}


@pytest.mark.parametrize("changes", MARIANS)
def test_a_marian_becomes_ours_with_the_same_logits_and_back_with_the_same_weights(sources, changes, tmp_path):
    marian = tiny_marian(**changes)
    before = {name: tensor.clone() for name, tensor in marian.state_dict().items()}
    random_state = torch.get_rng_state()
    model = from_marian(marian)
    assert torch.equal(torch.get_rng_state(), random_state)
    inputs = torch.randint(20, (3, 5), generator=torch.Generator().manual_seed(2))
    inputs[:, 0] = PAD
    expected = logits_of(marian, sources, inputs)
    torch.testing.assert_close(logits_of(model, sources, inputs), expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(loaded, sources, inputs), expected, rtol=1e-5, atol=1e-5)
    back = to_marian(model).state_dict()
    for name, tensor in marian.state_dict().items():
        assert torch.equal(tensor, before[name])
        if "embed_positions" not in name and not (name == "model.shared.weight" and name not in back):
            assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("changes", MARIANS)
def test_it_generates_what_marian_generates(sources, changes, num_beams):
    """With Marian's generation config: it never generates pad, and ends with EOS at the latest."""
    different = set()
    for seed in range(5):
        marian = tiny_marian(seed=seed, **changes)
        expected = marian.generate(**sources, num_beams=num_beams, do_sample=False).tolist()
        assert from_marian(marian).generate(**sources, num_beams=num_beams, do_sample=False).tolist() == expected
        different.update(map(tuple, expected))
    assert len(different) > 4


def test_its_search_too_never_finds_pad_which_would_be_the_best(sources):
    """Greedy search needs no length penalty; in Marian's logits the pad token is the best everywhere."""
    marian = tiny_marian(seed=5)
    marian.final_logits_bias[0, PAD] = 9.0
    settings = {"num_beams": 1, "do_sample": False, "forced_eos_token_id": None, "max_new_tokens": 9}
    expected = marian.generate(**sources, **settings)[:, 1:].tolist()
    model = from_marian(marian)
    chosen = saved_options(model.generation_config, num_beams=1, min_length=0, max_length=9)
    assert chosen.forbidden_tokens == (PAD,)
    found = search([model], sources["input_ids"], sources["attention_mask"], chosen)
    for row, (hypothesis,) in zip(expected, found, strict=True):
        assert hypothesis.tokens == row[: len(hypothesis.tokens)]
        assert PAD not in hypothesis.tokens
        assert len(hypothesis.tokens) == 9 or hypothesis.tokens[-1] == 0
    by_generate = model.generate(**sources, **settings, custom_generate=custom_generate)[:, 1:].tolist()
    assert [row[: len(one.tokens)] for row, (one,) in zip(by_generate, found, strict=True)] == [
        one.tokens for (one,) in found
    ]
    with pytest.raises(ValueError, match=r"the prefix of source 2 holds EOS, a forbidden token or .*: \[19\]"):
        search([model], sources["input_ids"], None, chosen, prefixes=[[3], [4], [PAD]])


def test_bad_words_of_several_tokens_are_refused():
    config = tiny_marian().generation_config
    config.bad_words_ids = [[3], [4, 5], [0]]
    with pytest.raises(ValueError, match=r"bad_words_ids has \[4, 5\]"):
        saved_options(config)
    config.bad_words_ids = [[3], [0]]
    assert saved_options(config).forbidden_tokens == (3,)  # EOS is never forbidden, as in generate


def test_a_model_says_how_its_generation_config_searches():
    model = tiny_model()
    model.generation_config.update(num_beams=3, length_penalty=0.5)
    options = model.search_options(num_beams=2, num_hypotheses=None)
    assert (options.num_beams, options.alpha, options.num_hypotheses, options.min_length) == (2, 0.5, 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_attention_heads": 2}, r"encoder_attention_heads \(4\) and decoder_attention_heads \(2\)"),
        ({"decoder_ffn_dim": 32}, r"encoder_ffn_dim \(24\) and decoder_ffn_dim \(32\)"),
        ({"normalize_before": True}, r"normalize_before \(True\) must be False"),
        ({"static_position_embeddings": False}, r"static_position_embeddings \(False\) must be True"),
    ],
)
def test_what_ours_cannot_be_is_refused_by_field_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        from_marian(tiny_marian(**changes))


def test_a_width_without_pairs_is_refused():
    with pytest.raises(ValueError, match=r"d_model \(15\) must be even"):
        from_marian(tiny_marian(d_model=15, encoder_attention_heads=3, decoder_attention_heads=3))


def test_ours_is_not_taken_for_a_marian():
    with pytest.raises(ValueError, match="a VanillaTrmForConditionalGeneration is no MarianMTModel"):
        from_marian(tiny_model())


# From torch ---------------------------------------------------------------------------------------------------------


def torch_transformer(**changes):
    torch.manual_seed(3)
    sizes = {"d_model": 16, "nhead": 4, "dim_feedforward": 24, "num_encoder_layers": 2, "num_decoder_layers": 3}
    model = nn.Transformer(**sizes | changes, batch_first=True).eval()
    for name, parameter in model.named_parameters():
        is_final = name.startswith(("encoder.norm", "decoder.norm"))
        if not is_final and not name.startswith(("encoder.layers.1.norm2", "decoder.layers.2.norm3")):
            nn.init.normal_(parameter, std=0.3)
    return model


def ours(**changes):
    sizes = {"attention_bias": True, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 4}
    return tiny_model(**sizes | changes)


def entering(stack, tokens):
    """What a stack of ours takes in for tokens: embeddings and positions."""
    length = tokens.size(1)
    return stack.embed(tokens, None) + stack.embed_positions(torch.arange(length), length)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_torchs_transformer_computes_what_ours_computes_with_its_weights(batch, bias):
    """Its final norms change nothing here but by the epsilon of LayerNorm: the last layer has just normalised."""
    theirs, model = torch_transformer(bias=bias), ours()
    load_torch_weights(model, theirs.state_dict(), norm_first=False)
    inputs = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    padding = batch["attention_mask"] == 0
    causal = nn.Transformer.generate_square_subsequent_mask(inputs.size(1)).bool()
    expected = theirs(
        entering(model.get_encoder(), batch["input_ids"]),
        entering(model.get_decoder(), inputs),
        tgt_mask=causal,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
    found = model.model(**sources, decoder_input_ids=inputs).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@torch.no_grad()
def test_a_stack_without_a_final_norm_is_torchs(batch, kind):
    theirs = getattr(torch_transformer(), kind)
    theirs.norm = None
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = ours()
    stack = model.get_encoder() if kind == "encoder" else model.get_decoder()
    load_torch_weights(stack, theirs.state_dict(), norm_first=False)
    memory = torch.randn(3, 4, 16)
    entered = entering(stack, batch["input_ids"])
    if kind == "encoder":
        expected, found = theirs(entered), stack(input_ids=batch["input_ids"])
    else:
        causal = nn.Transformer.generate_square_subsequent_mask(7).bool()
        expected = theirs(entered, memory, tgt_mask=causal)
        found = stack(input_ids=batch["input_ids"], encoder_hidden_states=memory)
    torch.testing.assert_close(found.last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def changed(name, value):
    state = torch_transformer().state_dict()
    state[name] = torch.full_like(state[name], value)
    return state


REFUSED = {
    "a norm that scales": (
        {},
        lambda: changed("encoder.norm.weight", 2.0),
        r"LayerNorm behind the stack \(encoder.norm\).*but encoder.norm has weights other than 1",
    ),
    "a norm that undoes the last layer's": (
        {},
        lambda: changed("decoder.layers.2.norm3.bias", 0.5),
        r"LayerNorm behind the stack \(decoder.norm\).*but the norm that closes the last layer has weights other",
    ),
    "too few layers": (
        {"decoder_layers": 4},
        lambda: torch_transformer().state_dict(),
        "the state dict has nothing for decoder.layers.3",
    ),
    "too many layers": (
        {"encoder_layers": 1},
        lambda: torch_transformer().state_dict(),
        "no place for 'encoder.layers.1.self_attn.in_proj_weight' in a stack of 1 layers$",
    ),
    "another width": (
        {"d_ff": 32},
        lambda: torch_transformer().state_dict(),
        r"'encoder.layers.0.linear1.weight' is of \(24, 16\), and the model's .*fc1.weight of \(32, 16\)",
    ),
    "no place for biases": (
        {"attention_bias": False},
        lambda: torch_transformer().state_dict(),
        "no place for 'encoder.layers.0.self_attn.in_proj_bias'.*set attention_bias=True",
    ),
    "another module's": (
        {},
        lambda: torch_transformer().state_dict() | {"generator.weight": torch.zeros(1)},
        "nn.Transformer has no 'generator.weight'",
    ),
    "shared layers": (
        {"parameter_sharing": "all"},
        lambda: torch_transformer().state_dict(),
        r"parameter_sharing \('all'\) must be 'none'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_of_torchs_is_another_architecture_is_refused_and_changes_nothing(case):
    changes, state, message = REFUSED[case]
    model = ours(**changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_torch_weights(model, state(), norm_first=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("kind", [VanillaTrmEncoder, VanillaTrmDecoder])
def test_pre_layer_norm_is_refused(kind):
    stack = kind(tiny_config(attention_bias=True))
    with pytest.raises(ValueError, match=r"norm_first \(True\) must be False"):
        load_torch_weights(stack, {}, norm_first=True)
