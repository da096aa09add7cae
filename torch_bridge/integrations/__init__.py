"""The loss in the models of other libraries: Hugging Face transformers, PyTorch's pipeline schedules."""
