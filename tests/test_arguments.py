"""The command line and the YAML below it."""

import dataclasses
from pathlib import Path

import pytest

import training
from hf_vanilla_trm import VanillaTrmConfig
from training.arguments import DataArguments, ModelArguments, RecipeArguments, parse_arguments

REQUIRED = ["--output_dir", "out", "--embedded_corpus", "en-de", "--max_updates", "5"]
SHIPPED = (Path(training.__file__).parent / "configs").glob("*.yaml")
CONFIGS = sorted(path for path in SHIPPED if not path.name.startswith(("finetune_", "compare_")))


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return ["--config", str(path)]

    return write


def error_of(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_a_yaml_value_replaces_the_default_and_a_flag_beats_both(config):
    yaml = config("warmup_steps: 70\nbatch_tokens: 500\n")
    recipe = parse_arguments([*yaml, *REQUIRED, "--batch_tokens", "900"])[2]
    assert (recipe.warmup_steps, recipe.batch_tokens) == (70, 900)
    assert recipe.adam_beta2 == RecipeArguments(output_dir="x", max_updates=1).adam_beta2


def test_a_flag_before_config_wins_too(config):
    yaml = config("batch_tokens: 500\n")
    assert parse_arguments(["--batch_tokens", "900", *yaml, *REQUIRED])[2].batch_tokens == 900


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "'1e-4'"])
def test_a_number_in_scientific_notation_is_a_float(config, text):
    rate = parse_arguments([*config(f"learning_rate: {text}\n"), *REQUIRED])[2].learning_rate
    assert isinstance(rate, float)
    assert rate == 0.0001


def test_yaml_reads_no_as_the_word_and_true_as_a_boolean(config):
    recipe = parse_arguments([*config("mixed_precision: no\nuse_cpu: true\n"), *REQUIRED])[2]
    assert recipe.mixed_precision == "no"
    assert recipe.use_cpu is True


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_leaves_the_default(config, null):
    recipe = parse_arguments([*config(f"learning_rate: {null}\nmax_grad_norm: {null}\n"), *REQUIRED])[2]
    assert recipe.learning_rate is None
    assert recipe.max_grad_norm == 0.0


def test_an_unknown_key_stops_the_run_and_names_the_nearest(config, capsys):
    message = error_of([*config("seed: 1\nlearning_rat: 1e-4\n"), *REQUIRED], capsys)
    assert "line 2: unknown argument 'learning_rat'; did you mean 'learning_rate'?" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "line 2: seed stands twice"),
        ("seed: [1, 2]\n", "line 1: seed takes one value"),
        ("- seed\n", "must hold lines of the form"),
        ("seed: {\n", "is not YAML"),
        ("seed: one\n", "invalid int value: 'one'"),
        ("report_to: blue\n", "invalid choice: 'blue'"),
        ("metrics:\n- a: b\n", "line 1: metrics takes a list of texts, got None among them"),
        ("metrics: [a, -b]\n", "line 1: metrics takes a list of texts, got '-b' among them"),
    ],
)
def test_a_malformed_config_is_refused(config, capsys, text, message):
    assert message in error_of([*config(text), *REQUIRED], capsys)


def test_lists_are_lists_on_the_command_line_and_in_a_file(config):
    yaml = config("metrics: [meteor, own/metric.py]\nfurther_validation:\n- a.en:a.de\n")
    _, data, recipe = parse_arguments([*yaml, *REQUIRED])
    assert (recipe.metrics, data.further_validation) == (["meteor", "own/metric.py"], ["a.en:a.de"])
    assert parse_arguments([*yaml, *REQUIRED, "--metrics", "ter"])[2].metrics == ["ter"]
    assert parse_arguments(REQUIRED)[2].metrics == []


def test_a_config_that_does_not_exist_is_refused(capsys):
    assert "nowhere.yaml" in error_of(["--config", "nowhere.yaml", *REQUIRED], capsys)


@pytest.mark.parametrize("flag", ["--learning_rat", "--batch"])
def test_an_unknown_or_shortened_flag_is_refused(capsys, flag):
    assert flag in error_of([*REQUIRED, f"{flag}=1"], capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--embedded_corpus", "en-de", "--train_file", "a.tsv"], "got embedded_corpus, train_file"),
        ([], "got none of them"),
        (["--train_source", "a"], "train_source and train_target go together"),
        (["--train_file", "a.tsv", "--test_target", "b"], "test_source and test_target go together"),
    ],
)
def test_exactly_one_kind_of_data_must_be_given(capsys, flags, message):
    assert message in error_of(["--output_dir", "out", "--max_updates", "5", *flags], capsys)


def test_a_run_that_nothing_stops_is_refused(capsys):
    message = error_of(["--output_dir", "out", "--embedded_corpus", "en-de"], capsys)
    assert "give max_updates, max_epochs or max_minutes" in message


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("batch_tokens", 0, "must be greater than 0"),
        ("max_minutes", 0, "must be greater than 0"),
        ("adam_epsilon", 0, "must be greater than 0"),
        ("learning_rate", -1, "must be greater than 0"),
        ("warmup_steps", -1, "must not be negative"),
        ("label_smoothing", 1, "must be below 1"),
        ("adam_beta2", 1, "must be below 1"),
        ("keep_checkpoints", -2, "must not be negative"),
        ("learning_rate", "inf", "must be a finite number"),
        ("max_length_a", "inf", "must be a finite number"),
        ("alpha", -1, "must be at least 0"),
        ("alpha", "nan", "must be at least 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_value(capsys, name, value, rule):
    message = error_of([*REQUIRED, f"--{name}={value}"], capsys)
    assert f"{name} ({value}" in message
    assert rule in message


def test_cooldown_needs_a_known_last_update(capsys):
    flags = ["--output_dir", "out", "--embedded_corpus", "en-de", "--max_epochs", "5", "--cooldown_steps", "3"]
    assert "cooldown_steps (3) counts back from max_updates" in error_of(flags, capsys)


def test_every_model_argument_is_a_field_of_the_config_and_has_no_default_of_its_own():
    config_fields = {field.name for field in dataclasses.fields(VanillaTrmConfig)}
    config_fields.add("attn_implementation")  # every config takes it, none saves it
    assert {field.name for field in dataclasses.fields(ModelArguments)} <= config_fields
    assert ModelArguments().given() == {}
    assert ModelArguments(d_ff=24, dropout=0.0).given() == {"d_ff": 24, "dropout": 0.0}


def test_no_name_is_in_two_groups_of_arguments():
    names = [
        field.name for kind in (ModelArguments, DataArguments, RecipeArguments) for field in dataclasses.fields(kind)
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    has_data = any(name in path.read_text() for name in ("embedded_corpus", "dataset_name"))
    data = [] if has_data else ["--train_file", "pairs.tsv"]
    model = parse_arguments(["--config", str(path), *data])[0]
    VanillaTrmConfig(**model.given())


def test_there_are_shipped_configs():
    assert {"demo.yaml", "multi30k_tiny.yaml"} <= {path.name for path in CONFIGS}


def test_an_empty_text_in_quotes_is_a_value_and_an_empty_value_is_none(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("output_dir: x\nmax_updates: 1\ndataset_name: d\ntest_split: ''\nvalidation_split:\n")
    _, data, _ = parse_arguments(["--config", str(config)])
    assert (data.test_split, data.validation_split) == ("", "validation")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"embedded_corpus": "en-de", "validation_file": "x.tsv"}, "embedded_corpus has its own splits: .* x.tsv"),
        ({"dataset_name": "d", "test_source": "a", "test_target": "b"}, "dataset_name has its own splits: .* a would"),
        (
            {"train_file": "t.tsv", "validation_file": "x.tsv", "validation_source": "a", "validation_target": "b"},
            r"validation_file \(x.tsv\) and validation_source \(a\)",
        ),
        ({"embedded_corpus": "en-de", "max_source_length": 0}, r"max_source_length \(0\) must be at least 1"),
    ],
)
def test_data_that_would_not_be_read_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        DataArguments(**given)
