"""The parts of the language-model training run, one concern a file; `experiments.train_lm` puts them together."""
