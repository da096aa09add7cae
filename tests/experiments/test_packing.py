import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lm.data import packing

END = 0


def test_rows_share_one_token_so_that_every_token_is_predicted_once() -> None:
    stream = np.arange(1, 12, dtype=np.int32)
    rows = packing.pack(stream, 4, END)
    np.testing.assert_array_equal(rows, [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 10, 11, END, END]])


def test_a_stream_that_fits_exactly_is_not_filled_up() -> None:
    np.testing.assert_array_equal(packing.pack(np.arange(1, 6, dtype=np.int32), 4, END), [[1, 2, 3, 4, 5]])
    assert packing.pack(np.array([END], np.int32), 4, END).shape == (0, 5)


def test_labels_are_ignored_across_document_boundaries_and_in_what_fills_a_row_up() -> None:
    stream = np.array([5, 6, END, 7, 8, 9, END], np.int32)
    rows = packing.pack(stream, 4, END)
    inputs, labels = packing.inputs_and_labels(jnp.asarray(rows), END)
    np.testing.assert_array_equal(inputs, [[5, 6, END, 7], [8, 9, END, END]])
    np.testing.assert_array_equal(labels, [[6, END, -100, 8], [9, END, -100, -100]])
    assert packing.counted_labels(rows, END) == 5


def test_the_training_order_is_a_function_of_seed_and_step() -> None:
    rows = np.arange(10, dtype=np.int32)[:, None]
    batches = [packing.training_batch(rows, seed=3, step=step, batch_size=4) for step in range(5)]
    seen = np.concatenate(batches).ravel()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()
    np.testing.assert_array_equal(packing.training_batch(rows, seed=3, step=3, batch_size=4), batches[3])
    assert packing.training_batch(rows, seed=4, step=3, batch_size=4).tolist() != batches[3].tolist()


def test_validation_batches_are_of_equal_shape_and_hold_every_row_once() -> None:
    rows = np.arange(1, 11, dtype=np.int32).reshape(5, 2)
    batches = packing.validation_batches(rows, 2, END)
    assert [batch.shape for batch in batches] == [(2, 2)] * 3
    np.testing.assert_array_equal(np.concatenate(batches)[:5], rows)
    assert packing.counted_labels(batches[-1], END) == 1


def test_the_unigram_entropy_is_that_of_the_tokens_own_distribution() -> None:
    assert packing.unigram_entropy(np.array([7, 7, 7, 7])) == 0.0
    assert packing.unigram_entropy(np.repeat([1, 5, 900, 3], 10)) == pytest.approx(np.log(4))


def test_the_mean_loss_is_over_labels_and_not_over_batches() -> None:
    rows = np.array([[1, 2, 2], [4, END, 2], [END, END, 3]], np.int32)  # of 2, 1 and no labels
    dataset = packing.Dataset(rows, rows, END, 0.0, "")
    assert packing.mean_loss(dataset, 1, lambda batch: batch[0, 0]) == 2.0
