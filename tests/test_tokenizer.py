"""The tokenizer: lossless, the promised ids, a plain fast tokenizer in any process; and other people's tokenizers."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, CanineTokenizer, PreTrainedTokenizerFast

from tests.conftest import tiny_model
from training.tokenizer import load_tokenizer, train_tokenizer

TEXTS = [
    "A man in a blue shirt is standing on a ladder .",
    "Ein Mann in einem blauen Hemd steht auf einer Leiter .",
    "In 2024 there were 365 days and 1234 nights; 27 of 28 agree.",
    "Was ist das </s> <s> <pad> <unk> ? </s></s>",
    "两个年轻的白人男子在外面。",
] * 5

HARD_TEXTS = [
    "x != y . Was ?",
    " leading",
    "trailing ",
    "two  spaces   three",
    "   ",
    "",
    "MiXeD Case, ÄÖÜ äöü ß ẞ",
    "don't can't 'tis o'clock \"quoted\" „zitiert“ «cité»",
    "a , b . c ! d ?",
    "0123456789 3.14 1,000.50 ٣٤٥ ½ ² Ⅻ",
    "中文，日本語、한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 é (combining: e\u0301)",
    "</s>",
    "a</s>b <s> <pad>\u2028<unk> <mask>",
    "tab\there\u00a0no-break\u202fthin\u3000wide\u0085next\u000cform",
    "\ufeffbyte order mark, zero\u200bwidth, \u0000 and \ufffd",
    "\U000e0001\U0010ffff\ue000",
    "line\nend\r\n",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=320)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_decoding_gives_back_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_decoding_a_padded_batch_gives_back_its_texts_also_after_saving(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for candidate in (tokenizer, AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        ids = candidate(HARD_TEXTS, padding=True).input_ids
        assert len({len(row) for row in ids}) == 1
        assert candidate.batch_decode(ids, skip_special_tokens=True) == HARD_TEXTS
        assert candidate(text_target=HARD_TEXTS, padding=True).input_ids == ids


def test_spaces_before_between_and_after_words_come_back_in_every_number(tokenizer):
    for before, between, after in itertools.product(range(3), repeat=3):
        text = f"{' ' * before}x{' ' * between}!={' ' * between}y{' ' * after}."
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_special_tokens_have_the_first_ids(tokenizer):
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<s>", "<pad>", "</s>", "<unk>"]
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id) == (2, 3)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_text_becomes_its_pieces_and_one_eos_and_no_other_special_token(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids[-1] == tokenizer.eos_token_id
    assert all(token > 3 for token in ids[:-1])


def test_the_smallest_vocabulary_spells_every_byte():
    tokenizer = train_tokenizer(["abc"], vocab_size=260)
    assert len(tokenizer) == 260
    for text in HARD_TEXTS:
        assert len(tokenizer(text).input_ids) == len(text.encode("utf-8")) + 1
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_digits_stand_one_by_one(tokenizer):
    """Although "2024", "365" and "1234" occur often enough in the training text to be merged."""
    tokens = tokenizer("In 2024 365 1234nights").tokens()
    assert [token for token in tokens if any(map(str.isdigit, token))] == list("20243651234")


def test_frequent_words_become_one_token():
    assert train_tokenizer(["see the sea"] * 9, 280)("the sea").tokens() == ["the", "Ġsea", "</s>"]


def test_a_batch_has_what_the_model_takes_and_nothing_else(tokenizer):
    assert set(tokenizer(["a", "b c"], padding=True)) == {"input_ids", "attention_mask"}
    assert tokenizer(text_target="a b").input_ids == tokenizer("a b").input_ids


@pytest.mark.parametrize("vocab_size", [0, 4, 256, 259])
def test_a_vocabulary_without_room_for_the_bytes_is_refused(vocab_size):
    with pytest.raises(ValueError, match=rf"vocab_size \({vocab_size}\) must be at least 260"):
        train_tokenizer(TEXTS, vocab_size=vocab_size)


def test_training_on_nothing_is_refused():
    with pytest.raises(ValueError, match="no text to train a tokenizer on"):
        train_tokenizer([], vocab_size=300)


def test_training_takes_every_text_of_an_iterator():
    assert train_tokenizer(iter(TEXTS), 320).get_vocab() == train_tokenizer(TEXTS, 320).get_vocab()
    assert "see" in train_tokenizer(iter(["see see see"]), 262).get_vocab()


FRESH_PROCESS = """
import json, sys
if sys.argv[2] == "without":
    sys.modules["hf_vanilla_trm"] = None  # importing it fails
else:
    import hf_vanilla_trm
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = [tokenizer(text).input_ids for text in json.loads(sys.argv[3])]
print()  # the question about the code may stand on the line
print(json.dumps([ids, tokenizer.batch_decode(ids, skip_special_tokens=True), tokenizer.is_fast]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["with", "without"])
@pytest.mark.parametrize("whose", ["ours", "a user's"])
def test_saved_beside_the_model_it_is_the_same_in_a_fresh_process(tokenizer, tmp_path, package, whose):
    if whose == "a user's":
        special_tokens = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
        word_tokenizer(**special_tokens).save_pretrained(tmp_path / "theirs")
        tokenizer = load_tokenizer(str(tmp_path / "theirs"))
    texts = [*HARD_TEXTS, "a  B b 🫨 a.b"]
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(tmp_path), package, json.dumps(texts)],
        stdin=subprocess.DEVNULL,  # nobody answers the question whether to run the code beside the model
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    ids, decoded, fast = json.loads(result.stdout.splitlines()[-1])
    assert ids == [tokenizer(text).input_ids for text in texts]
    assert decoded == (texts if whose == "ours" else tokenizer.batch_decode(ids, skip_special_tokens=True))
    assert fast


def test_what_is_saved_names_no_code(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["tokenizer.json", "tokenizer_config.json"]
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "auto_map" not in saved
    assert saved["clean_up_tokenization_spaces"] is False
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is PreTrainedTokenizerFast


@pytest.mark.slow
def test_training_gives_the_same_vocabulary_in_every_process():
    code = (
        "import json, sys; from training.tokenizer import train_tokenizer;"
        "print(json.dumps(train_tokenizer(json.load(sys.stdin), 320).get_vocab(), sort_keys=True))"
    )
    vocabularies = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(TEXTS),
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(vocabularies) == 1


# Tokenizers of others


def word_tokenizer(**special_tokens):
    """A tokenizer of words, of somebody else: BOS before a text and EOS after it where it has them."""
    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", "[MASK]", "a", "b"]
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if "bos_token" in special_tokens:
        backend.post_processor = processors.TemplateProcessing(
            single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **special_tokens)


def test_our_own_tokenizer_loads_unchanged(tokenizer, tmp_path, caplog):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert [loaded(text).input_ids for text in HARD_TEXTS] == [tokenizer(text).input_ids for text in HARD_TEXTS]
    assert not caplog.records


@pytest.mark.parametrize(
    ("special_tokens", "message"),
    [
        ({"eos_token": "[EOS]"}, "has no pad_token;"),
        ({"pad_token": "[PAD]"}, "has no eos_token;"),
        ({}, "has no pad_token and no eos_token;"),
        ({"eos_token": "[EOS]", "pad_token": "[EOS]"}, r"has '\[EOS\]' as pad_token and as eos_token"),
    ],
)
def test_a_tokenizer_without_pad_or_eos_is_refused(tmp_path, special_tokens, message):
    word_tokenizer(**special_tokens).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_fast_tokenizer_that_begins_with_bos_is_changed_aloud_and_stays_so_when_saved(tmp_path, caplog):
    special_tokens = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    word_tokenizer(**special_tokens).save_pretrained(tmp_path / "theirs")
    assert AutoTokenizer.from_pretrained(tmp_path / "theirs")("a b").input_ids == [1, 5, 6, 2]
    load_tokenizer(str(tmp_path / "theirs")).save_pretrained(tmp_path / "ours")
    assert "from here on it gives pieces and '[EOS]'" in caplog.text
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert reloaded("a b").input_ids == [5, 6, 2]
    assert [reloaded.pad_token_id, reloaded.bos_token_id, reloaded.mask_token_id] == [0, 1, 4]
    assert reloaded.decode([5, 6, 2], skip_special_tokens=True) == "a b"


def test_a_slow_tokenizer_that_ends_with_eos_is_taken(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    # ByT5: three special tokens, then the bytes; EOS is 1
    assert tokenizer("aß").input_ids == [3 + byte for byte in "aß".encode()] + [1]


def test_a_slow_tokenizer_with_another_frame_is_refused(tmp_path):
    CanineTokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it must give pieces and"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_pads_on_the_left_is_made_to_pad_on_the_right(tmp_path):
    tokenizer = train_tokenizer(["ein Haus"], vocab_size=262)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).padding_side == "right"


def test_special_tokens_of_a_users_tokenizer_stay_whole(tmp_path):
    tokenizer = train_tokenizer(["ein Haus", "a dog"], vocab_size=262)
    tokenizer.split_special_tokens = False
    tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    frame = {"special_tokens": [("<s>", 0), ("</s>", 2)]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", **frame)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    ids = loaded("<2de>a dog").input_ids
    assert ids[0] == loaded.convert_tokens_to_ids("<2de>") == tokenizer.convert_tokens_to_ids("<2de>")
    assert ids[-1] == loaded.eos_token_id


def test_a_missing_tokenizer_is_named():
    with pytest.raises(ValueError, match="there is no tokenizer in '/missing/folder'"):
        load_tokenizer("/missing/folder")
