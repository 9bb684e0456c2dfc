"""The configuration: defaults, aliases, and a clear error for every value that breaks a rule."""

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from hf_vanilla_trm import VanillaTrmConfig
from tests.conftest import tiny_config, tiny_model


def test_the_defaults_are_the_base_model_of_table_3():
    config = VanillaTrmConfig()
    assert (config.encoder_layers, config.decoder_layers) == (6, 6)
    assert (config.d_model, config.d_ff, config.num_attention_heads, config.dropout) == (512, 2048, 8, 0.1)


def test_tools_find_the_sizes_under_their_own_names():
    config = tiny_config(encoder_layers=3)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (16, 3, 24)


def test_every_field_survives_saving_and_loading(tmp_path):
    config = tiny_config(
        decoder_layers=3, attention_bias=True, tie_word_embeddings=False, dropout=0, eos_token_id=[2, 4]
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is VanillaTrmConfig
    assert loaded.to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 500, "num_attention_heads": 8}, r"d_model \(500\) must be divisible by num_attention_heads \(8\)"),
        ({"d_model": 15, "num_attention_heads": 3}, r"d_model \(15\) must be even"),
        ({"vocab_size": 0}, r"vocab_size \(0\) must be at least 1"),
        ({"encoder_layers": 0}, r"encoder_layers \(0\) must be at least 1"),
        ({"dropout": 1.0}, r"dropout \(1\.0\) must be at least 0 and below 1"),
        ({"attention_dropout": -0.1}, r"attention_dropout \(-0\.1\)"),
        ({"layer_norm_eps": 0.0}, r"layer_norm_eps \(0\.0\) must be positive"),
        ({"activation_function": "rlu"}, r"activation_function \('rlu'\) must be one of .*relu"),
        ({"decoder_vocab_size": 30}, r"decoder_vocab_size \(30\) must equal vocab_size \(20\)"),
        ({"pad_token_id": 20}, r"pad_token_id \(20\) must be at least 0 and below vocab_size \(20\)"),
        ({"decoder_start_token_id": -1}, r"decoder_start_token_id \(-1\)"),
        ({"pad_token_id": 2}, r"pad_token_id \(2\) must differ from eos_token_id \(2\)"),
        ({"eos_token_id": [2, 1]}, r"pad_token_id \(1\) must differ from eos_token_id \(\[2, 1\]\)"),
        ({"parameter_sharing": "al"}, r"parameter_sharing \('al'\) must be one of none, attention, ffn, all"),
        ({"sharing_order": "zigzag"}, r"sharing_order \('zigzag'\) must be one of sequence, cycle, cycle_reverse"),
        (
            {"parameter_sharing": "all", "num_unique_layers": 4},
            r"num_unique_layers \(4\) must divide encoder_layers \(2\)",
        ),
        ({"embedding_size": 17}, r"embedding_size \(17\) must be at least 1 and at most d_model \(16\)"),
        ({"embedding_size": 0}, r"embedding_size \(0\) must be at least 1"),
        (
            {"encoder_attention_heads": 2, "decoder_attention_heads": 4},
            r"\(2\) and decoder_attention_heads \(4\) must be",
        ),
        ({"encoder_ffn_dim": 32}, r"encoder_ffn_dim \(32\) is another name for d_ff \(24\)"),
    ],
)
def test_a_bad_value_is_refused_with_the_value_and_the_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize("changes", [{"d_model": "16"}, {"dropout": "0.1"}, {"vocab_size": 20.0}])
def test_a_wrong_type_is_refused(changes):
    with pytest.raises(StrictDataclassFieldValidationError, match=next(iter(changes))):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_token_id": 2}, r"pad_token_id \(2\) must differ from eos_token_id \(2\)"),
        ({"eos_token_id": 1}, r"pad_token_id \(1\) must differ from eos_token_id \(1\)"),
        ({"eos_token_id": [2, 1]}, r"pad_token_id \(1\) must differ from eos_token_id \(\[2, 1\]\)"),
        ({"pad_token_id": 20}, r"pad_token_id \(20\) must be at least 0 and below vocab_size \(20\)"),
        ({"num_attention_heads": 3}, r"d_model \(16\) must be divisible by num_attention_heads \(3\)"),
        ({"dropout": 1.5}, r"dropout \(1\.5\)"),
        ({"sharing_order": "zigzag"}, r"sharing_order \('zigzag'\)"),
    ],
)
def test_a_bad_value_set_after_construction_is_refused_by_the_model_and_when_saving(tmp_path, changes, message):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **changes)
    loaded, late = AutoConfig.from_pretrained(tmp_path, **changes), tiny_config()
    for name, value in changes.items():
        setattr(late, name, value)
    for config in (loaded, late):
        for auto_class in (AutoModelForSeq2SeqLM, AutoModel):
            with pytest.raises(ValueError, match=message):
                auto_class.from_config(config)
        with pytest.raises(ValueError, match=message):
            config.save_pretrained(tmp_path / "elsewhere")


def test_separate_vocabularies_have_sizes_of_their_own():
    config = tiny_config(share_encoder_decoder_embeddings=False, decoder_vocab_size=30, decoder_start_token_id=25)
    assert (config.vocab_size, config.decoder_vocab_size) == (20, 30)
    # transformers sizes caches and reads vocabularies through this view.
    assert config.get_text_config(decoder=True).vocab_size == 30


def test_other_libraries_names_set_the_one_value():
    config = VanillaTrmConfig(
        d_model=16, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32
    )
    assert (config.num_attention_heads, config.d_ff) == (4, 32)
    assert "encoder_ffn_dim" not in config.to_dict()
