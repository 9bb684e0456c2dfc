"""Training, decoding and scoring, run from a clone as `python -m training.X`; not part of the installed package."""
