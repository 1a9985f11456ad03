"""Ragged columns against rows that are written out."""

from __future__ import annotations

import numpy as np

from dcp.storage.geometry.ragged import by_ndim, expand_ranges, gather_rows, row_products, row_sums, starts


def test_ragged_rows() -> None:
    """Ranges, gathered rows, products and sums of ragged columns, with empty rows among them."""
    start, values = starts([2, 0, 3, 0]), np.array([2, 3, 4, 5, 6], np.int64)
    assert expand_ranges(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert gather_rows(values, start, np.array([2, 1, 0])).tolist() == [4, 5, 6, 2, 3]
    assert row_products(values, start).tolist() == [6, 1, 120, 1]
    assert row_sums(values, start).tolist() == [5, 0, 15, 0]
    groups = {
        group.offsets.shape[1]: group.rows.tolist() for group in by_ndim(np.arange(4), start, values, values)
    }
    assert groups == {0: [1, 3], 2: [0], 3: [2]}
