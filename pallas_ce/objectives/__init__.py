"""Objectives built on the public functions: losses by name, several tasks, sampled softmax, CRF, post-training."""
