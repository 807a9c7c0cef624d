"""Tokens in one line and back."""

import numpy as np
import pytest

from seed_jax import token_line

PLACES = [np.array([[[True, False, True]]]), np.zeros((1, 1, 2), bool), np.array([[[True]], [[False]]])]
GRIDS = [np.array([[[1.0, 9.0, 2.0]]]), np.full((1, 1, 2), 9.0), np.array([[[3.0]], [[9.0]]])]


def test_gather_takes_the_counted_tokens_end_to_end():
  np.testing.assert_array_equal(token_line.gather(GRIDS, PLACES), [1, 2, 3])


def test_of_nothing_the_line_is_empty():
  assert token_line.gather([], []).shape == (0,)
  assert token_line.scatter(np.zeros(4), []) == []


def test_scatter_puts_them_back_with_zeros_elsewhere_and_ignores_the_fill():
  back = token_line.scatter(np.array([1.0, 2.0, 3.0, 7.0]), PLACES)
  for found, grid, place in zip(back, GRIDS, PLACES, strict=True):
    np.testing.assert_array_equal(found, np.where(place, grid, 0))


def test_filled_has_one_shape_and_says_when_there_is_no_room():
  line = token_line.filled(np.array([1, 2, 3]), 5)
  assert line.dtype == np.float32
  np.testing.assert_array_equal(line, [[1, 2, 3, 0, 0]])
  with pytest.raises(ValueError, match="3 sampled tokens, but there is room for 2"):
    token_line.filled(np.zeros(3), 2)
