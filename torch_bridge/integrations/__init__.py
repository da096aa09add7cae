"""The loss in the models of other libraries: Hugging Face transformers, TRL, PyTorch's pipeline schedules."""
