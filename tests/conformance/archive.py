"""transformers' own tests of its models, from the source archive of the installed version.

`python -m tests.conformance.archive` downloads them into `.cache/`, once; `load()` makes them importable as the package
`transformers_tests`. What the archive's tests import and the archive lacks stands in `supplied/`.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path

import transformers
from filelock import FileLock

PACKAGE = "transformers_tests"
CACHE = Path(__file__).parents[2] / ".cache"
TESTS = CACHE / f"transformers-{transformers.__version__}-tests"
SUPPLIED = Path(__file__).parent / "supplied"
# Much in the tests depends on these tables, which know the library's own models only; `conftest.py` enters ours.
TABLES = {
    "MODEL_MAPPING_NAMES": ("VanillaTrmModel", "VanillaTrmEncoderModel"),
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "VanillaTrmForConditionalGeneration",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "VanillaTrmForSequenceClassification",
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES": "VanillaTrmEncoderModel",
}


def fetch() -> Path:
    """Return the folder of the tests; download and unpack it where it is not there yet."""
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / "transformers-tests.lock"):
        if not TESTS.exists():
            _download()
    return TESTS


def _download() -> None:
    requirement = f"transformers=={transformers.__version__}"
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder]
        from_source = ["--no-deps", "--no-build-isolation", "--no-binary", "transformers"]
        subprocess.run([*pip, *from_source, requirement], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        tests = Path(folder) / archive.name.removesuffix(".tar.gz") / "tests"
        (tests / "__init__.py").touch()  # which the archive lacks too, and one of its tests reads
        shutil.move(tests, TESTS)


def load() -> None:
    """Make `transformers_tests` importable, and open those of its tests to our model that run on listed models only."""
    if PACKAGE in sys.modules:
        return
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(fetch()), str(SUPPLIED)]
    sys.modules[PACKAGE] = package

    from transformers_tests import test_fsdp_mixin, test_tensor_parallel_mixin

    # The FSDP helpers know no other head than a causal language model's, and want a core for each of up to four
    # processes, which run as well on fewer.
    test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES.add("vanilla_trm")
    test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES.add("vanilla_trm")
    test_fsdp_mixin.AutoModelForCausalLM = transformers.AutoModelForSeq2SeqLM
    test_fsdp_mixin._get_available_fsdp_workers = lambda: 4


if __name__ == "__main__":
    fetch()
