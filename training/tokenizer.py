"""Joint byte-level BPE: one vocabulary for source and target, as in section 5.1 of the paper.

The alphabet is the 256 bytes, so that no text is unknown and decoding gives back every character that went in. Digits
stand one by one, so that a number is spelled the same way wherever it occurs.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

BOS, PAD, EOS, UNK = SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # in the order of their ids, 0 to 3
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; it turns a text into its pieces and EOS.

    Args:
        texts: Training sentences, sources and targets alike.
        vocab_size: Entries of the vocabulary, the special tokens and the bytes among them; texts too short to give so
            many merges make it smaller.

    Returns:
        A plain fast tokenizer: the folder that its `save_pretrained` writes is loaded by `AutoTokenizer` alone.

    Raises:
        ValueError: If `vocab_size` has no room for the special tokens and the bytes, or there is no text.
    """
    smallest = len(SPECIAL_TOKENS) + len(BYTES)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size ({vocab_size}) must be at least {smallest}: "
            f"{len(SPECIAL_TOKENS)} special tokens and {len(BYTES)} bytes"
        )
    texts = iter(texts)
    first = next(texts, None)
    if first is None:
        raise ValueError("there is no text to train a tokenizer on")

    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=BYTES,  # also those that the texts lack
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain([first], texts), trainer)
    # Split: else "</s>" in a text becomes EOS, and decoding drops it.
    specials = {"bos_token": BOS, "pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
    return _fast_tokenizer(tokenizer, split_special_tokens=True, **specials)


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Load an existing tokenizer from a folder or the Hub, for use with sentences that are pieces and EOS.

    A fast tokenizer that puts other special tokens around a text (BART's begins with BOS) is changed to put EOS after
    it and nothing else, with a warning. What is saved is the changed one, so that training and use agree.

    Raises:
        ValueError: If it has no padding or no end token, if these are one token, or if it puts other special tokens
            around a text and is not a fast tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"there is no tokenizer in {name_or_path!r}, neither as a folder nor on the Hub ({error})"
        ) from error
    missing = [name for name in ("pad_token", "eos_token") if getattr(tokenizer, name) is None]
    if missing:
        raise ValueError(f"tokenizer {name_or_path!r} has no {' and no '.join(missing)}; training needs both")
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ValueError(
            f"tokenizer {name_or_path!r} has {tokenizer.pad_token!r} as pad_token and as eos_token; "
            "the end of a sentence must differ from padding"
        )
    tokenizer.padding_side = "right"  # positions are absolute; saved with the model, so that users pad alike
    pieces = tokenizer("a", add_special_tokens=False).input_ids
    framed = tokenizer("a").input_ids
    if framed == [*pieces, tokenizer.eos_token_id]:
        return tokenizer
    frame = f"{name_or_path!r} gives {tokenizer.convert_ids_to_tokens(framed)}"
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {frame} for 'a'; it must give pieces and {tokenizer.eos_token!r}")
    logger.warning("tokenizer %s for 'a'; from here on it gives pieces and %r", frame, tokenizer.eos_token)
    # Its own special tokens in a text, language tags for one, mean what they meant.
    split = tokenizer.split_special_tokens
    return _fast_tokenizer(tokenizer.backend_tokenizer, split_special_tokens=split, **tokenizer.special_tokens_map)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Raises:
        ValueError: If there are such; the message has the highest id and the vocabulary's size.
    """
    source = target = tokenizer.get_vocab()
    if getattr(tokenizer, "separate_vocabs", False):  # a MarianTokenizer with one for each language
        source, target = tokenizer.encoder, tokenizer.target_encoder
    for name, vocabulary in (("vocab_size", source), ("decoder_vocab_size", target)):
        size, highest = getattr(model.config, name, None), max(vocabulary.values())
        if size is not None and highest >= size:
            raise ValueError(f"the tokenizer has ids up to {highest}, but the model's {name} is {size}")


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of how a tokenizer splits and numbers: a run that is continued must do it alike."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer)
    return hashlib.sha256((vocabulary + rules).encode()).hexdigest()


def _fast_tokenizer(
    tokenizer: Tokenizer, *, eos_token: str, split_special_tokens: bool, **special_tokens: str
) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer so that it puts EOS after a text, and decodes to what it encoded."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos_token}",
        pair=f"$A $B {eos_token}",
        special_tokens=[(eos_token, tokenizer.token_to_id(eos_token))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos_token,
        **special_tokens,
        clean_up_tokenization_spaces=False,  # else some readers decode "a , b" as "a, b"
        split_special_tokens=split_special_tokens,
    )
