"""Configuration of the Transformer of "Attention Is All You Need" (Vaswani et al., 2017).

Architecture only: how the model is trained is the training code's business, and how it decodes stands in the generation
config. The defaults are the paper's base model (Table 3).
"""

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

PARAMETER_SHARING_MODES = ("none", "attention", "ffn", "all")
CODE_FILES = (
    "configuration_vanilla_trm.py",
    "decoding.py",
    "dropout.py",
    "generation.py",
    "incremental.py",
    "layers.py",
    "loss.py",
    "modeling_vanilla_trm.py",
    "projections.py",
    "softmax.py",
    "threads.py",
    "translation.py",
)
"""The code that travels with a saved model."""
SHARING_ORDERS = ("sequence", "cycle", "cycle_reverse")
SHARING_FIELDS = ("parameter_sharing", "num_unique_layers", "sharing_order")
DEPTH_FIELDS = ("encoder_layers", "decoder_layers", "is_encoder_decoder")


@strict
class VanillaTrmConfig(PreTrainedConfig):
    r"""The sizes and switches of one model; every field is saved in `config.json`.

    Args:
        vocab_size: Tokens in the (source) vocabulary.
        d_model: Width of every layer's input and output.
        encoder_layers: N of the encoder.
        decoder_layers: N of the decoder.
        num_attention_heads: h, in every attention; must divide `d_model`, so that d_k = d_v = d_model / h.
        d_ff: Inner width of the position-wise feed-forward networks.
        dropout: P_drop, on each sub-layer's output and on the sum of embeddings and positions (section 5.4).
        attention_dropout: Dropout on the attention weights; the paper has none.
        activation_dropout: Dropout on the feed-forward's inner activations; the paper has none.
        activation_function: A key of transformers' `ACT2FN`; the paper's is ReLU.
        layer_norm_eps: Added to the variance in LayerNorm.
        attention_bias: A bias on the four attention projections; the paper has none, converted models may.
        output_bias: A bias on the output projection; the paper has none, converted models may.
        scale_embedding: Multiply embeddings by sqrt(d_model) (section 3.4).
        tie_word_embeddings: The output projection is the target embedding (section 3.4).
        share_encoder_decoder_embeddings: Source and target have one vocabulary and one embedding (section 3.4).
        decoder_vocab_size: Tokens in the target vocabulary, where `share_encoder_decoder_embeddings` is False;
            otherwise `vocab_size`.
        embedding_size: Width of the embeddings, at most `d_model`. Where it is smaller, a matrix without bias, one for
            source and target, takes them to `d_model`, and another takes the decoder's output back to that width before
            the output projection (ALBERT's factorised embeddings; Lan et al., 2020, section 3.1).
        parameter_sharing: What the layers of a stack share: "none"; "attention", the projections of self- and of
            cross-attention, each with its own kind; "ffn", the feed-forward networks; or "all", norms included (Lan et
            al., 2020, section 3.1). Encoder and decoder never share with each other.
        num_unique_layers: M, the distinct layers of a stack that shares; must divide both depths. ALBERT has 1. Ignored
            without sharing.
        sharing_order: Which depth uses which distinct layer, for example with N = 6 and M = 3: "sequence" (AABBCC),
            "cycle" (ABCABC) or "cycle_reverse" (ABCCBA: the cycle, with its last M layers reversed), after Takase and
            Kiyono (2021).
        max_position_embeddings: Positions computed in advance, and what tools read as a length; longer sequences work
            just as well.
        pad_token_id: Fills source sequences and shifted labels; must differ from `eos_token_id`.
        bos_token_id: Beginning of a sentence.
        eos_token_id: End of a sentence.
        decoder_start_token_id: The decoder's first input, in training and in decoding.
        use_cache: Keep keys and values between decoding steps.

    `encoder_attention_heads`, `decoder_attention_heads` and `encoder_ffn_dim`, `decoder_ffn_dim` are accepted as other
    libraries' names for `num_attention_heads` and `d_ff`, in the constructor and in saved files.

    Raises:
        ValueError: A value breaks one of the rules above; the message names value and rule.
        huggingface_hub.errors.StrictDataclassFieldValidationError: A value has the wrong type.
    """

    model_type = "vanilla_trm"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "intermediate_size": "d_ff",
    }
    # Empty, since transformers' defaults name the modules of a decoder without an encoder: the plans for distributed
    # training stand with the stacks that they divide, in `modeling_vanilla_trm.py`.
    base_model_tp_plan: ClassVar[dict[str, Any]] = {}
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {}

    vocab_size: int = 37000
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    num_attention_heads: int = 8
    d_ff: int = 2048
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    activation_function: str = "relu"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = False
    output_bias: bool = False
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    share_encoder_decoder_embeddings: bool = True
    # An int once constructed: transformers derives a decoder's config by stripping `decoder_` from the names of fields,
    # and the vocabulary size cannot be None.
    decoder_vocab_size: int | None = None
    embedding_size: int | None = None
    parameter_sharing: str = "none"
    num_unique_layers: int = 1
    sharing_order: str = "sequence"
    max_position_embeddings: int = 1024
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 0
    use_cache: bool = True
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Resolve the aliases and the target vocabulary, then validate."""
        self._take_alias("num_attention_heads", ("encoder_attention_heads", "decoder_attention_heads"), kwargs)
        self._take_alias("d_ff", ("encoder_ffn_dim", "decoder_ffn_dim"), kwargs)
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if self.architectures is None:
            # AutoModel looks through the list to choose between our model and its encoder alone.
            self.architectures = []
        super().__post_init__(**kwargs)
        self.check()

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write `config.json`, and beside it the code of the model; every model, Trainer and push saves through it.

        The folder then loads with `trust_remote_code=True` where the package is not installed, whichever class was
        saved: `auto_map` names the class of every Auto class.

        Args:
            save_directory: A folder, made where it does not exist.
            push_to_hub: Upload the folder's content afterwards; see transformers for `kwargs`.

        Raises:
            ValueError: A field has been set to a value that breaks a rule.
        """
        self.check()
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name in CODE_FILES:
            file = Path(__file__).with_name(name)
            if file.exists() and file.resolve() != (folder / name).resolve():
                shutil.copyfile(file, folder / name)
        # As remote code, a config has no other file than its own beside it. A model has them all, and has written them;
        # of a config by itself, `auto_map` goes on naming the repository that has them.
        if all((folder / name).exists() for name in CODE_FILES):
            self.auto_map = self._complete_auto_map()
        super().save_pretrained(save_directory, **kwargs)
        if push_to_hub:
            self.push_to_hub(**{"repo_id": folder.name} | kwargs)

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings: `embedding_size`, or `d_model` where that is None."""
        return self.embedding_size or self.d_model

    def unique_layer_at(self, depth: int, num_layers: int) -> int:
        """Which distinct layer a stack uses at a depth; both count from 0.

        Args:
            depth: Place in the stack.
            num_layers: N, the depth of the whole stack.
        """
        if self.parameter_sharing == "none":
            return depth
        unique = self.num_unique_layers
        if self.sharing_order == "sequence":
            return depth // (num_layers // unique)
        place = depth % unique
        is_reversed = self.sharing_order == "cycle_reverse" and depth >= num_layers - unique
        return unique - 1 - place if is_reversed else place

    def _complete_auto_map(self) -> dict[str, str]:
        """The class behind every Auto class; behind AutoModel, the one without a head of what was saved."""
        encoder_only = {"VanillaTrmEncoderModel", "VanillaTrmForSequenceClassification"}
        bare = "VanillaTrmEncoderModel" if encoder_only & set(self.architectures or []) else "VanillaTrmModel"
        classes = {
            "AutoModel": bare,
            "AutoModelForSeq2SeqLM": "VanillaTrmForConditionalGeneration",
            "AutoModelForSequenceClassification": "VanillaTrmForSequenceClassification",
            "AutoModelForTextEncoding": "VanillaTrmEncoderModel",
        }
        auto_map = {name: f"modeling_vanilla_trm.{classes[name]}" for name in classes}
        return {"AutoConfig": "configuration_vanilla_trm.VanillaTrmConfig"} | auto_map

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; the size of the one vocabulary, where source and target share it, is set on both sides."""
        super().__setattr__(name, value)
        if name == "vocab_size" and self.share_encoder_decoder_embeddings:
            super().__setattr__("decoder_vocab_size", value)

    def _take_alias(self, field: str, aliases: tuple[str, str], kwargs: dict[str, Any]) -> None:
        """Move the value given under `aliases` to `field`: here, since `attribute_map` would let the second overwrite
        the first unseen.
        """
        given = {name: kwargs.pop(name) for name in aliases if name in kwargs}
        if len(set(given.values())) > 1:
            values = " and ".join(f"{name} ({value})" for name, value in given.items())
            raise ValueError(f"{values} must be equal: both stacks have one {field}")
        for name, value in given.items():
            if getattr(self, field) not in (value, getattr(type(self), field)):
                raise ValueError(
                    f"{name} ({value}) is another name for {field} ({getattr(self, field)}): they must be equal"
                )
            setattr(self, field, value)

    def check(self) -> None:
        """Check every rule; called by the constructor and by every model, for fields may have been set in between.

        `@strict` calls the same checks, now and before saving, but wraps what they raise; users should see the
        ValueError itself.

        Raises:
            ValueError: A value breaks a rule.
        """
        self.validate_architecture()
        self.validate_special_tokens()
        self.validate_parameter_sharing()

    def validate_architecture(self) -> None:
        """Check sizes, rates and names; called by the constructor and before saving."""
        sizes = (
            "vocab_size",
            "decoder_vocab_size",
            "d_model",
            "encoder_layers",
            "decoder_layers",
            "num_attention_heads",
            "d_ff",
        )
        for name in (*sizes, "num_unique_layers", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.d_model % self.num_attention_heads:
            raise ValueError(
                f"d_model ({self.d_model}) must be divisible by num_attention_heads ({self.num_attention_heads})"
            )
        if self.d_model % 2:
            raise ValueError(f"d_model ({self.d_model}) must be even: positions are pairs of a sine and a cosine")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0 and below 1")
        if self.layer_norm_eps <= 0:
            raise ValueError(f"layer_norm_eps ({self.layer_norm_eps}) must be positive")
        if self.activation_function not in ACT2FN:
            raise ValueError(
                f"activation_function ({self.activation_function!r}) must be one of {', '.join(sorted(ACT2FN))}"
            )
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            raise ValueError(
                f"decoder_vocab_size ({self.decoder_vocab_size}) must equal vocab_size ({self.vocab_size}) unless "
                "share_encoder_decoder_embeddings is False"
            )

    def validate_special_tokens(self) -> None:
        """Check the ids of the special tokens against both vocabularies and each other."""
        source = {"pad_token_id": self.pad_token_id, "bos_token_id": self.bos_token_id}
        target = {"decoder_start_token_id": self.decoder_start_token_id}
        end = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        for ids, size_name in ((source, "vocab_size"), (target, "decoder_vocab_size")):
            size = getattr(self, size_name)
            for name, value in (*ids.items(), *(("eos_token_id", value) for value in end)):
                if value is not None and not 0 <= value < size:
                    raise ValueError(f"{name} ({value}) must be at least 0 and below {size_name} ({size})")
        if self.pad_token_id is not None and self.pad_token_id in end:
            raise ValueError(
                f"pad_token_id ({self.pad_token_id}) must differ from eos_token_id ({self.eos_token_id}): "
                "padding could not be told from the end of a sentence"
            )

    def validate_parameter_sharing(self) -> None:
        """Check the sharing fields against each other and the depths, and the width of factorised embeddings."""
        if self.parameter_sharing not in PARAMETER_SHARING_MODES:
            raise ValueError(
                f"parameter_sharing ({self.parameter_sharing!r}) must be one of {', '.join(PARAMETER_SHARING_MODES)}"
            )
        if self.sharing_order not in SHARING_ORDERS:
            raise ValueError(f"sharing_order ({self.sharing_order!r}) must be one of {', '.join(SHARING_ORDERS)}")
        if self.embedding_size is not None and not 1 <= self.embedding_size <= self.d_model:
            raise ValueError(
                f"embedding_size ({self.embedding_size}) must be at least 1 and at most d_model ({self.d_model})"
            )
        if self.parameter_sharing != "none":
            for name in ("encoder_layers", "decoder_layers") if self.is_encoder_decoder else ("encoder_layers",):
                if getattr(self, name) % self.num_unique_layers:
                    raise ValueError(
                        f"num_unique_layers ({self.num_unique_layers}) must divide {name} ({getattr(self, name)})"
                    )


def describe_sharing(config: dict[str, Any]) -> str:
    """What a config, as a dictionary, says of parameter sharing, in words."""
    mode = config.get("parameter_sharing", "none")
    if mode == "none":
        return "parameter_sharing 'none'"
    unique, order = config.get("num_unique_layers", 1), config.get("sharing_order", "sequence")
    return f"parameter_sharing '{mode}' (num_unique_layers {unique}, sharing_order '{order}')"


def arrangement_of(config: dict[str, Any]) -> tuple[Any, ...]:
    """What a config, as a dictionary, says of parameter sharing, equal for equal arrangements of the same tensors: the
    mode and the distinct layer of every depth of both stacks.
    """
    fields = VanillaTrmConfig(**{name: config[name] for name in (*SHARING_FIELDS, *DEPTH_FIELDS) if name in config})
    depths: tuple[int, ...] = (fields.encoder_layers, fields.decoder_layers)
    if fields.parameter_sharing != "none":
        # The decoder that an encoder alone does not have need not be divisible: it has no arrangement.
        depths = tuple(0 if total % fields.num_unique_layers else total for total in depths)
    layers = tuple(tuple(fields.unique_layer_at(depth, total) for depth in range(total)) for total in depths)
    if layers == tuple(tuple(range(total)) for total in depths):
        return ("none",)  # every depth has its own, whatever it is called
    return fields.parameter_sharing, *layers


__all__ = ["VanillaTrmConfig"]
