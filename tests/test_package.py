"""The package as users get it: what importing does, which way imports run, and what the wheel holds."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import hf_vanilla_trm
from tests.conftest import tiny_model

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_vanilla_trm"
# Who may import whom inside the package: imports run one way.
ALLOWED = {
    "configuration_vanilla_trm": set(),
    "dropout": set(),
    "layers": {"dropout", "projections", "softmax"},
    "loss": {"projections"},
    "projections": set(),
    "softmax": set(),
    "decoding": set(),
    "incremental": {"layers", "projections", "softmax"},
    "generation": {"decoding", "incremental", "layers"},
    "threads": set(),
    "translation": {"decoding", "generation", "projections", "threads"},
    "modeling_vanilla_trm": {
        "configuration_vanilla_trm",
        "decoding",
        "dropout",
        "generation",
        "layers",
        "loss",
        "projections",
        "translation",
    },
    "onnx_export": {"incremental", "modeling_vanilla_trm"},
    "sharing": {"modeling_vanilla_trm"},
    "quantization": set(),
    "conversion": {"configuration_vanilla_trm", "modeling_vanilla_trm", "sharing"},
    "ctranslate2_export": {"conversion", "generation"},
    "__init__": {
        "configuration_vanilla_trm",
        "conversion",
        "ctranslate2_export",
        "decoding",
        "generation",
        "modeling_vanilla_trm",
        "onnx_export",
        "quantization",
        "sharing",
        "translation",
    },
}
# What only an extra installs, and a function imports when it is called.
EXTRAS = {"ctranslate2_export": {"ctranslate2"}, "quantization": {"torchao"}}


def imports_of(path):
    """(level, module, names) of every import statement, with level 0 for absolute ones."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module, tuple(alias.name for alias in node.names)


def without_torchaos(errors):
    """Standard error without what torchao says about libraries of its own, wherever it is installed without a GPU."""
    return "".join(line for line in errors.splitlines(keepends=True) if not re.search("torchao|_pytree", line))


def run(code, cwd, **environment):
    """Run Python code in a fresh interpreter outside of the clone."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_the_package_is_flat_and_its_imports_run_one_way(path):
    assert path.parent == PACKAGE
    for level, module, _ in imports_of(path):
        assert level in (0, 1)
        if level == 1:
            assert module in ALLOWED[path.stem], f"{path.stem} must not import {module}"
        else:
            top = module.split(".")[0]
            known = sys.stdlib_module_names | {"numpy", "torch", "transformers", "huggingface_hub"}
            assert top in known | EXTRAS.get(path.stem, set()), module
            assert path.stem != "layers" or top in sys.stdlib_module_names | {"torch"}, module


@pytest.mark.parametrize("path", sorted((ROOT / "training").rglob("*.py")), ids=lambda path: path.stem)
def test_training_uses_the_packages_public_names_only(path):
    for _, module, names in imports_of(path):
        if module and module.split(".")[0] == "hf_vanilla_trm":
            assert module == "hf_vanilla_trm"
            assert set(names) <= set(hf_vanilla_trm.__all__)


@pytest.mark.parametrize("path", sorted((ROOT / "training").rglob("*.py")), ids=lambda path: path.stem)
def test_no_command_trusts_remote_code_by_itself(path):
    """A Space does, for its one model: `space.py` writes it as a text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        given = node.keywords if isinstance(node, ast.Call) else []
        values = [keyword.value for keyword in given if keyword.arg == "trust_remote_code"]
        assert not [value for value in values if not isinstance(value, ast.Constant) or value.value]


def test_importing_twice_and_reloading_is_harmless():
    for _ in range(2):
        importlib.reload(hf_vanilla_trm)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["reload", "forget"])
def test_reloading_every_module_twice_leaves_the_auto_classes_with_the_newest_classes(tmp_path, way):
    """As a notebook does that reloads what was edited, or that drops modules to import them again."""
    tiny_model().save_pretrained(tmp_path / "model")
    code = f"""
import importlib, sys
import hf_vanilla_trm
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
names = [name for name in sys.modules if name.split(".")[0] == "hf_vanilla_trm"]
names.sort(key=lambda name: (name == "hf_vanilla_trm", "modeling" in name, "encoder_only" in name))
for _ in range(2):
    if {way!r} == "reload":
        for name in names:
            importlib.reload(sys.modules[name])
    else:
        for name in names:
            del sys.modules[name]
    import hf_vanilla_trm
    assert type(AutoConfig.from_pretrained("model")) is hf_vanilla_trm.VanillaTrmConfig
    assert type(AutoModel.from_pretrained("model")) is hf_vanilla_trm.VanillaTrmModel
    loaded = AutoModelForSeq2SeqLM.from_pretrained("model")
    assert type(loaded) is hf_vanilla_trm.VanillaTrmForConditionalGeneration
"""
    result = run(code, tmp_path, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("first", ["transformers", "hf_vanilla_trm"])
def test_importing_registers_and_does_nothing_else(tmp_path, first):
    code = f"""
import sys
import {first}
import hf_vanilla_trm, transformers
config = transformers.AutoConfig.for_model("vanilla_trm", d_model=16, num_attention_heads=2, d_ff=8, vocab_size=9)
assert type(transformers.AutoModelForSeq2SeqLM.from_config(config)).__module__ == "hf_vanilla_trm.modeling_vanilla_trm"
assert type(transformers.AutoModel.from_config(config)) is hf_vanilla_trm.VanillaTrmModel
unwanted = {{"datasets", "evaluate", "babel", "matplotlib", "sacrebleu", "training"}} & set(sys.modules)
assert not unwanted, unwanted
"""
    result = run(code, tmp_path, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert without_torchaos(result.stderr) == ""


def test_the_version_is_the_one_of_the_build_and_of_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert hf_vanilla_trm.__version__ == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_model_type_and_the_class_names_are_ours_alone():
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    model_type = hf_vanilla_trm.VanillaTrmConfig.model_type
    built_in = {path.name for path in Path(transformers.__file__).parent.joinpath("models").iterdir()}
    assert {"bert", "marian"} <= built_in & CONFIG_MAPPING_NAMES.keys() & MODEL_MAPPING_NAMES.keys()
    assert model_type not in built_in | CONFIG_MAPPING_NAMES.keys() | MODEL_MAPPING_NAMES.keys()
    assert model_type == "vanilla_trm"
    assert hasattr(transformers, "MarianMTModel")
    assert not [name for name in hf_vanilla_trm.__all__ if hasattr(transformers, name)]


def test_a_model_type_that_transformers_comes_to_have_is_an_error_and_not_overridden_in_silence(monkeypatch):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.setitem(CONFIG_MAPPING._mapping, "vanilla_trm", "VanillaTrmConfig")
    with pytest.raises(ValueError, match="'vanilla_trm' is already used by a Transformers config"):
        importlib.reload(hf_vanilla_trm)


def test_without_the_package_and_the_code_loading_fails_with_the_model_type_named(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    load = "from transformers import AutoModelForSeq2SeqLM; AutoModelForSeq2SeqLM.from_pretrained('model')"
    without = run(load, tmp_path, PYTHONPATH="")
    assert without.returncode != 0
    assert "vanilla_trm" in without.stderr
    assert run(f"import hf_vanilla_trm; {load}", tmp_path, PYTHONPATH=str(ROOT)).returncode == 0


@pytest.mark.slow
def test_the_built_wheel_holds_the_package_alone_and_works_outside_the_clone(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    files = {path for path in names if not path.parts[0].endswith(".dist-info")}
    assert files == {path.relative_to(ROOT) for path in (*PACKAGE.glob("*.py"), PACKAGE / "py.typed")}
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    tiny_model().save_pretrained(tmp_path / "model")
    code = f"""
import hf_vanilla_trm, torch
from transformers import AutoModelForSeq2SeqLM
assert hf_vanilla_trm.__file__.startswith({str(site)!r}), hf_vanilla_trm.__file__
print(AutoModelForSeq2SeqLM.from_pretrained("model").generate(torch.tensor([[5, 6, 2]]), max_new_tokens=3).shape[0])
"""
    result = run(code, tmp_path, PYTHONPATH=str(site))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "1"
