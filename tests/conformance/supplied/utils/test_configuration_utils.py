"""Stands for the table that the archive lacks: settings that every config takes, none at its default."""

config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["VanillaTrmModel"],
    "id2label": {0: "label"},
    "label2id": {"label": "0"},
    "problem_type": "regression",
    "is_encoder_decoder": False,
    "bos_token_id": 6,
    "pad_token_id": 7,
    "eos_token_id": 8,
    "decoder_start_token_id": 9,
    "tie_word_embeddings": False,
}
