"""The folder of a Hub Space that shows the page of `demo.py`: what `python -m training.demo --space DIR` writes."""

import shutil
import tomllib
from pathlib import Path

import gradio
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

ROOT = Path(__file__).parent.parent
CODE = ("training/__init__.py", "training/attention.py", "training/demo.py")
PACKAGES = ("torch", "transformers", "gradio", "matplotlib")
APP = '''"""Translates with {model}, whose repository holds the model's code: the page asks nobody before it runs it."""

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from training.demo import serve

MODEL = "{model}"
tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
serve(AutoModelForSeq2SeqLM.from_pretrained(MODEL, trust_remote_code=True), tokenizer, MODEL)
'''
README = """---
{metadata}---

Translates with [{model}](https://huggingface.co/{model}), the Transformer of "Attention Is All You Need", and shows
what attends to what. Written by `python -m training.demo --model {model} --space DIR` of hf_vanilla_trm, whose code is
under Apache-2.0.
"""


def write_space(model: str, folder: Path) -> list[Path]:
    """Write a Space for a model on the Hub; return its files. `hf upload USER/SPACE DIR --repo-type space` uploads it.

    Args:
        model: USER/NAME.
        folder: Must be empty, if it is there.

    Raises:
        OSError: If the Hub has no such model, or the folder cannot be written.
        ValueError: If the model is no USER/NAME, or the folder is not empty.
    """
    validate_repo_id(model)
    if "/" not in model or Path(model).exists():
        raise ValueError(f"a Space needs a model on the Hub, USER/NAME, which {model!r} is not: publish it first")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: a Space is written into a folder of its own")
    texts = {
        "app.py": APP.format(model=model),
        "README.md": README.format(model=model, metadata=yaml.safe_dump(front_matter(model), sort_keys=False)),
        "requirements.txt": "".join(f"{requirement}\n" for requirement in requirements()),
    }
    (folder / "training").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in CODE:
        shutil.copyfile(ROOT / name, folder / name)
    return [folder / name for name in (*texts, *CODE)]


def front_matter(model: str) -> dict[str, object]:
    """Return what the Hub reads at the head of a Space's README, with the licence of the model if it can be known.

    Raises:
        OSError: If the Hub has no such model.
    """
    license_name = None
    try:
        license_name = ModelCard.load(model).data.get("license")
    except RepositoryNotFoundError as error:
        raise OSError(f"there is no model {model} on the Hub that you may see: publish it first") from error
    except (EntryNotFoundError, HfHubHTTPError, OSError):  # no card, or no Hub: the Space can do without
        pass
    metadata: dict[str, object] = {
        "title": f"Translate with {model.split('/')[1]}",
        "sdk": "gradio",
        "sdk_version": gradio.__version__,
        "app_file": "app.py",
        "models": [model],
    }
    return metadata | ({"license": license_name} if license_name else {})


def requirements() -> list[str]:
    """Return what the Space must install, as pyproject.toml bounds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *extras["demo"], *extras["train"]]
    return [next(one for one in stated if one.startswith(f"{package}>=")) for package in PACKAGES]
