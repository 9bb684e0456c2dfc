"""Whether two models are of one architecture: whether the weights of one make the other compute the same."""

from transformers import PreTrainedConfig

from hf_vanilla_trm import arrangement_of, describe_sharing

FIELDS = (
    *("vocab_size", "decoder_vocab_size", "d_model", "embedding_size", "d_ff", "encoder_layers", "decoder_layers"),
    *("num_attention_heads", "activation_function", "layer_norm_eps", "attention_bias", "output_bias"),
    *("scale_embedding", "tie_word_embeddings", "share_encoder_decoder_embeddings"),
)
"""Of a config, besides those of parameter sharing. Many leave the tensors' shapes as they are."""


def check_architecture(given: PreTrainedConfig, wanted: PreTrainedConfig, name: str, other: str) -> None:
    """Make sure that a model's weights mean in another what they mean in their own.

    Args:
        given: Of the model whose weights they are.
        wanted: Of the model that gets them.
        name: What a message calls the first.
        other: What a message calls the second.

    Raises:
        ValueError: If the models differ, in sizes, switches, or the depths at which parameters are used.
    """
    for field in FIELDS:
        ours, theirs = _value(given, field), _value(wanted, field)
        if ours != theirs:
            raise ValueError(
                f"{name} and {other} are of different architectures: {field} is {ours} there and {theirs} here"
            )
    sharing = [describe_sharing(config.to_dict()) for config in (given, wanted)]
    if given.model_type != wanted.model_type or arrangement_of(given.to_dict()) != arrangement_of(wanted.to_dict()):
        raise ValueError(
            f"{name} and {other} are of different architectures: {given.model_type} with {sharing[0]} there, "
            f"{wanted.model_type} with {sharing[1]} here"
        )


def _value(config: PreTrainedConfig, field: str) -> object:
    """A field, or what it stands for where it was left at None."""
    value = getattr(config, field, None)
    defaults = {"decoder_vocab_size": "vocab_size", "embedding_size": "d_model"}
    return getattr(config, defaults[field], None) if value is None and field in defaults else value
