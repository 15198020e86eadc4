"""Layouts of documents packed along a sequence, with padding behind the last one, for tests to draw."""

import numpy as np
from hypothesis import strategies as st

PADDING_STYLES = ("repeat", "diagonal")


@st.composite
def document_lengths(draw, tokens):
    """Lengths of at least one document: many of one token, some short, some long; the rest of `tokens` is padding."""
    lengths, left = [], tokens
    while left and (not lengths or draw(st.integers(0, 9))):
        lengths.append(draw(st.one_of(st.just(1), st.integers(1, min(left, 5)), st.integers(1, left))))
        left -= lengths[-1]
    return lengths


def layout_ends(lengths, tokens, style):
    """End rows of documents of the given lengths and of the padding behind them."""
    ends = np.repeat(np.cumsum(lengths), lengths)
    last = len(ends)
    padding = np.full(tokens - last, last) if style == "repeat" else np.arange(last, tokens)
    return np.concatenate([ends, padding]).astype(np.int32)


def layout_segments(lengths, tokens):
    """The same layout as segment ids, 0 for padding."""
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.concatenate([segments, np.zeros(tokens - len(segments))]).astype(np.int32)
