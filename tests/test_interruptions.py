"""A run that was stopped anywhere, by any signal, and started again is the run that was not, bit for bit."""

import itertools
import os
import signal
import subprocess
import time

import pytest

from tests.interruptions import (
    EXIT_CODES,
    POINTS,
    SIGNALS,
    Setting,
    arguments_of,
    equal_weights,
    interrupt_and_continue,
    make_data,
    metrics,
    train,
)
from tests.launch import CLONE, PYTHON, TWO_RANKS, run
from training.checkpoint import find_checkpoints

SETTINGS = [Setting(*values) for values in itertools.product((1, 2), (0, 2), (False, True))]
# Every point with every signal; `python -m tests.interruptions` tries each with every setting.
CASES = [
    (point, name, SETTINGS[(3 * number + 1) % len(SETTINGS)])
    for number, (point, name) in enumerate(itertools.product(POINTS, SIGNALS))
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Returns a function that gives the uninterrupted run of a setting."""
    runs = {}

    def run_of(setting):
        if setting not in runs:
            runs[setting] = tmp_path_factory.mktemp("whole") / "run"
            codes = train(arguments_of(setting, data, runs[setting]), setting.ranks)
            assert codes == [0] * setting.ranks
        return runs[setting]

    return run_of


def test_the_cases_cover_every_setting():
    assert {setting for *_, setting in CASES} == set(SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "name", "setting"), CASES, ids=[f"{point}, {name}, {setting}" for point, name, setting in CASES]
)
def test_an_interrupted_run_continues_bit_for_bit(whole, data, tmp_path, point, name, setting):
    codes, reached = interrupt_and_continue(setting, point, name, data, tmp_path / "run")
    assert codes[-1] == EXIT_CODES[name] or codes[0] == EXIT_CODES[name]
    if name != "kill -9":
        assert set(codes) <= {0, EXIT_CODES[name]}
        # Nothing was lost: what was done when the signal came is in the newest checkpoint.
        assert int(reached[-1].removeprefix("update-")) >= 5
    assert metrics(tmp_path / "run") == metrics(whole(setting))
    assert equal_weights(tmp_path / "run", whole(setting))


@pytest.mark.slow
def test_three_ranks_continue_bit_for_bit(whole, data, tmp_path):
    """Two numbers have one sum; with three, the order counts."""
    setting = Setting(ranks=3)
    interrupt_and_continue(setting, "in the middle of an epoch", "SIGTERM", data, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(whole(setting))
    assert equal_weights(tmp_path / "run", whole(setting))


@pytest.mark.slow
def test_a_second_session_is_kept_out_of_a_run_and_a_third_comes_after_a_killed_one(data, tmp_path):
    command = [*PYTHON, "training.train", *arguments_of(Setting(workers=2), data, tmp_path / "run")]
    process = start([*command, "--max_updates", "5000"])
    wait_for_a_checkpoint(tmp_path / "run")
    second = run([*command, "--max_updates", "5000"], check=False)
    assert second.returncode == 1
    assert b"another session trains in" in second.stderr
    assert process.poll() is None, "the first is disturbed"
    process.kill()
    process.wait()
    run([*command, "--allow_changes", "--max_epochs", "1"])


@pytest.mark.slow
def test_a_whole_group_with_loading_processes_saves_however_often_it_is_asked_to_stop(data, tmp_path):
    setting = Setting(workers=2, streamed=True)
    command = [*PYTHON, "training.train", *arguments_of(setting, data, tmp_path / "run"), "--max_updates", "5000"]
    process = start(command)
    wait_for_a_checkpoint(tmp_path / "run")
    for _ in range(3):
        os.killpg(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert b"the same command continues" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("setting", [Setting(1, 2, False), Setting(1, 0, True), Setting(1, 2, True)], ids=str)
def test_loading_processes_change_nothing(whole, setting):
    assert metrics(whole(setting)) == metrics(whole(Setting(1, 0, setting.streamed)))
    assert equal_weights(whole(setting), whole(Setting(1, 0, setting.streamed)))


@pytest.mark.slow
def test_the_comparison_sees_a_run_that_continued_otherwise(whole, data, tmp_path):
    setting = Setting()
    arguments = arguments_of(setting, data, tmp_path / "other")
    assert train([*arguments, "--seed", "5"]) == [0]
    assert metrics(tmp_path / "other") != metrics(whole(setting))
    assert not equal_weights(tmp_path / "other", whole(setting))


def start(command):
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=CLONE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for_a_checkpoint(folder):
    deadline = time.monotonic() + 120
    while not find_checkpoints(folder) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_a_signal_from_outside_saves_says_how_to_continue_and_ends(data, tmp_path, name, code):
    command = [*PYTHON, "training.train", *arguments_of(Setting(), data, tmp_path / "run"), "--max_updates", "5000"]
    process = start(command)
    wait_for_a_checkpoint(tmp_path / "run")
    process.send_signal(SIGNALS[name])
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"the same command continues" in stderr
    assert b"Traceback" not in stderr


@pytest.mark.slow
def test_a_launcher_that_gets_sigterm_leaves_a_run_of_two_ranks_that_continues(whole, data, tmp_path):
    command = [*TWO_RANKS, "training.train", *arguments_of(Setting(2), data, tmp_path / "run")]
    process = start(command)
    wait_for_a_checkpoint(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert subprocess.run(["pgrep", "-f", str(tmp_path / "run")], check=False).returncode == 1, "a rank is left"
    run(command)
    assert metrics(tmp_path / "run") == metrics(whole(Setting(2)))
    assert equal_weights(tmp_path / "run", whole(Setting(2)))
