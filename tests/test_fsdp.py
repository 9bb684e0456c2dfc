"""Training with parameters divided over two ranks (FSDP2) is training with whole ones.

On a CPU Accelerate does not divide; the state that makes it do so on GPUs is set here by hand.
"""

import contextlib
import signal
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import training.launching
import training.loop
from tests.interruptions import Setting, arguments_of, before_an_update, equal_weights, make_data, metrics, train


@contextlib.contextmanager
def fsdp2():
    """Every accelerator of this process divides its model as training/configs/accelerate/fsdp2.yaml asks."""
    start = Accelerator.__init__

    def wrapped(self, *arguments, **options):
        start(self, *arguments, **options)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["VanillaTrmEncoderLayer", "VanillaTrmDecoderLayer"],
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        )
        AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}

    prepare = training.loop.TrainingLoop._prepare

    def checked(self, *arguments):
        prepare(self, *arguments)
        divided = [isinstance(parameter, DTensor) for parameter in self.weights.parameters.values()]
        assert all(divided), "a parameter is whole"

    with (
        mock.patch.object(Accelerator, "__init__", wrapped),
        mock.patch.object(training.loop.TrainingLoop, "_prepare", checked),
        mock.patch.object(training.launching, "check_fsdp", return_value=None),
    ):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["none", "attention", "all"])
def test_divided_parameters_train_like_whole_ones_and_continue_exactly(data, tmp_path, sharing):
    runs = {name: tmp_path / name for name in ("whole", "divided", "interrupted")}
    flags = [f"--parameter_sharing={sharing}", "--embedding_size=8"]

    def arguments(name):
        return [*arguments_of(Setting(ranks=2), data, runs[name]), *flags]

    assert train(arguments("whole"), 2) == [0, 0]
    assert train(arguments("divided"), 2, lambda rank: fsdp2()) == [0, 0]
    for ours, others in zip(metrics(runs["divided"]), metrics(runs["whole"]), strict=True):
        for key in ours.keys() & {"train_loss", "validation_loss"}:
            assert ours[key] == pytest.approx(others[key], rel=1e-5)
    for name in ("best", "last", "checkpoints/update-14"):
        divided, whole = (load_file(runs[run] / name / "model.safetensors") for run in ("divided", "whole"))
        assert divided.keys() == whole.keys()
        for key, tensor in divided.items():
            torch.testing.assert_close(tensor, whole[key], rtol=0, atol=1e-4)

    @contextlib.contextmanager
    def interrupted():
        with fsdp2(), before_an_update(signal.SIGTERM):
            yield

    codes = train(arguments("interrupted"), 2, lambda rank: interrupted() if rank else fsdp2())
    assert codes == [0, 0]
    assert not (runs["interrupted"] / "results.json").exists()
    assert train(arguments("interrupted"), 2, lambda rank: fsdp2()) == [0, 0]
    assert metrics(runs["interrupted"]) == metrics(runs["divided"])
    assert equal_weights(runs["interrupted"], runs["divided"])
