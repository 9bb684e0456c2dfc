"""Three sources of very different lengths, and models that have learned to translate them."""

import functools

import torch

from tests.conftest import tiny_model


def without_labels(batch):
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def three_sources():
    """Sources of 30, 3 and 9 tokens and targets of 10; each target begins with another token."""
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(3, 20, (3, 30), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in ((1, 3), (2, 9)):
        input_ids[row, length:], attention_mask[row, length:] = 1, 0
    labels = torch.stack([torch.randperm(17, generator=generator)[:10] + 3 for _ in range(3)])
    labels[:, 0], labels[:, -1] = torch.tensor([3, 4, 5]), 2
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def one_source(batch, row):
    """A source by itself, without labels and padding."""
    length = int(batch["attention_mask"][row].sum())
    return {name: tensor[row : row + 1, :length] for name, tensor in without_labels(batch).items()}


@functools.cache
@torch.enable_grad()
def memorised(*, updates=None, **changes):
    """A model that was trained on `three_sources`: what it decodes differs from source to source and from step to step.

    Models with random weights soon repeat one token, whatever the source; comparing them would show little.
    """
    model, batch = tiny_model(**changes), three_sources()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):  # how many updates it takes depends on the rounding of a processor
        model.train()
        for _ in range(updates or (60 if model.config.embedding_size is None else 200)):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        model.eval().zero_grad()
        translations = model.generate(**without_labels(batch), max_new_tokens=10, do_sample=False)
        known = translations[:, 1:]
        if known.shape == batch["labels"].shape and (known == batch["labels"]).float().mean() > 0.8:
            return model
    raise AssertionError("the model has not learned to translate the three sources")
