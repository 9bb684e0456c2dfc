"""Aligned text files for the tests that train: every target is its source with the words reversed."""

import torch


def write_reversed_pairs(folder, words, rows, *, lengths, suffixes=("source", "target")):
    """Write two files for each split.

    Args:
        folder: Where to.
        words: What sentences are drawn from.
        rows: Sentences of each split, by its name.
        lengths: How many lengths there are; the shortest sentence has two words.
        suffixes: Of the files of sources and of targets.

    Returns:
        The files by the names of training's arguments: train_source, train_target and so on.
    """
    files = {}
    for split, number in rows.items():
        generator = torch.Generator().manual_seed(number)
        sentences = [
            [words[index] for index in torch.randint(len(words), (2 + row % lengths,), generator=generator)]
            for row in range(number)
        ]
        for side, suffix, step in (("source", suffixes[0], 1), ("target", suffixes[1], -1)):
            file = folder / f"{split}.{suffix}"
            file.write_text("".join(" ".join(sentence[::step]) + "\n" for sentence in sentences))
            files[f"{split}_{side}"] = file
    return files
