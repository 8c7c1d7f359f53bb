"""Token sets put one behind another without looking at what the ids mean."""

import numpy as np

from megatron.data.indexed import IndexedDataset, IndexedWriter

_TOKENS = 1 << 22  # copied together
_DOCUMENTS = 1 << 20  # looked at together


def append_set(writer: IndexedWriter, dataset: IndexedDataset) -> None:
    """Append all documents of `dataset` with their sequences to a set of the same element type, streaming.

    ValueError where the element types differ.
    """
    if dataset.dtype != writer.dtype:
        raise ValueError(
            f"{dataset.prefix} holds {dataset.dtype.name}, {writer.prefix} is to hold {writer.dtype.name}: sets of one "
            "element type can be put together"
        )
    starts = dataset.document_indices
    first = 0
    while first < len(starts) - 1:
        last = _documents_that_fit(dataset, first)
        begin, end = int(starts[first]), int(starts[last])
        counts = np.diff(starts[first : last + 1])
        writer.add_documents(dataset.get_run(begin, end), dataset.sizes[begin:end], counts)
        first = last


def _documents_that_fit(dataset: IndexedDataset, first: int) -> int:
    """The end of a run of documents from `first` on with about `_TOKENS` tokens: at least one of them."""
    starts = dataset.document_indices[first : first + _DOCUMENTS + 1]
    ends = np.cumsum(dataset.sizes[starts[0] : starts[-1]], dtype=np.int64)
    before = np.concatenate([[0], ends])[starts - starts[0]]  # tokens of the run in front of each document
    return first + max(int(np.searchsorted(before, _TOKENS, side="right")) - 1, 1)
