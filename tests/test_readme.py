"""Every fenced command of the README runs, in a copy of the clone, as written or shrunken for a stated reason."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [(language, block) for language, block in BLOCKS if language in ("bash", "python")]

# Blocks that are not run as they stand: what identifies one, and the reason.
NOT_RUN = {
    "make test\n": "it is what runs this test",
    "ddp.yaml --num_processes 8": "it needs eight GPUs and the network",
    "-m training.demo": "it shows a page until it is interrupted; test_demo.py visits it",
    "--dataset_name": "it needs the network; the same code loads a local data set in test_data.py",
}
# Added to the commands that contain the key, so that they take seconds instead of minutes or an hour.
TINY = "--max_updates 5 --cooldown_steps 0 --eval_every 1 --save_every 1 --eval_max_rows 3 --logging_every 1"
TINY += " --num_beams 2 --cpu_threads 1"
TINY_TUNING = "--max_steps 2 --per_device_train_batch_size 4 --eval_strategy steps --save_strategy steps"
SHRUNKEN = {
    "make demo": f"VENV={{prefix}} -o {{prefix}}/train DEMO_FLAGS='{TINY} --max_length_b 5'",
    "-m training.train": f"{TINY} --vocab_size 300 --d_model 16 --d_ff 16 --num_attention_heads 2 --max_length_b 5",
    "-m training.compare_sharing": "--modes all --no_wider --no_deeper --min_exact_match 0 "
    f"--arguments '{TINY} --report_to none --d_model 16 --d_ff 16 --max_length_b 5'",
    "-m training.finetune": f"{TINY_TUNING} --eval_steps 2 --save_steps 2",
}
PAIRS = [("Two dogs run.", "Zwei Hunde laufen."), ("A man sleeps.", "Ein Mann schläft."), ("Snow!", "Schnee!")]


def test_every_fence_has_a_language_and_only_texts_and_citations_are_not_commands():
    assert README.count("```") == 2 * len(BLOCKS)
    assert {language for language, _ in BLOCKS} == {"bash", "python", "text", "bibtex"}


def test_every_exemption_is_still_needed():
    for marker in (*NOT_RUN, *SHRUNKEN):
        assert any(marker in block for _, block in COMMANDS), f"{marker!r} is no longer in the README"


def test_every_relative_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_every_module_of_the_paper_map_holds_what_the_map_says():
    for names, target in re.findall(r"\| ((?:[^|]*?`\w+`)+[^|]*?) in \[[^]]+\]\(([^)]+)\)", README):
        code = (ROOT / target).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"(class|def) {name}\b", code), f"{name} is not in {target}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the clone, with data of three kinds where the README's commands look for it."""
    clone = tmp_path_factory.mktemp("readme") / "clone"
    ignore = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, clone, ignore=ignore)
    data = clone / "data"
    data.mkdir()
    for split in ("train", "val", "test"):
        for language, side in (("en", 0), ("de", 1)):
            text = "".join(f"{pair[side]} {number}\n" for number in range(8) for pair in PAIRS)
            (data / f"{split}.{language}").write_text(text, encoding="utf-8")
        rows = "".join(f"{source}\t{target}\n" for source, target in PAIRS * 8)
        (data / f"{split}.tsv").write_text(f"en\tde\n{rows}", encoding="utf-8")
    return clone


def shrink(command):
    for marker, flags in SHRUNKEN.items():
        if marker in command:
            return f"{command} {flags.format(prefix=sys.prefix)}"
    return command


def commands_of(block):
    """The shell commands of a block, with continued lines joined."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.slow
def test_the_commands_run_in_the_order_of_the_readme(clone):
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(clone),
        "OMP_NUM_THREADS": "1",
    }
    for language, block in COMMANDS:
        if any(marker in block for marker in NOT_RUN):
            continue
        calls = (
            [["bash", "-euo", "pipefail", "-c", shrink(command)] for command in commands_of(block)]
            if language == "bash"
            else [[sys.executable, "-c", block]]
        )
        for call in calls:
            result = subprocess.run(call, cwd=clone, env=environment, capture_output=True, text=True, check=False)
            assert result.returncode == 0, f"{call[-1]}\n{result.stdout}\n{result.stderr}"
    translations = (clone / "runs" / "mine" / "test.de").read_text(encoding="utf-8")
    assert translations.count("\n") == len(PAIRS) * 8
