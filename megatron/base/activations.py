"""Bytes that a transformer layer keeps for its backward pass.

Letters: `s` sequence, `b` micro-batch, `h` hidden, `n` heads, `f` ffn size, `t` tensor-parallel size.
"""


def activation_bytes(
    s: int,
    b: int,
    h: int,
    n: int,
    *,
    f: int | None = None,
    projection: int | None = None,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: str | None = None,
    distribute_saved: bool = False,
    fused_attention: bool = False,
    attention_dropout: bool = True,
    hidden_dropout: bool = True,
    width: int = 2,
) -> int:
    """Bytes of one layer's activations on one tensor rank.

    At the defaults `sbh (34 + 5 n s / h)`; with t ranks `sbh (10 + 24/t + 5 n s / (h t))`, with sequence parallelism
    `(sbh/t) (34 + 5 n s / h)`, with selective recomputation too `34 sbh / t`, fully recomputed `2 sbh`
    (arXiv:2205.05198, table 2). Left out, as there, is what has no h or s x s: the norms' statistics (16 bytes a token)
    and, of a fused kernel, a number for each query. At the peak of full recomputation one whole layer comes on top.

    Args:
        f: inner size of the MLP, 4 h by default.
        projection: heads times head size, h by default.
        sequence_parallel: norms, dropout and what is between them work on s/t tokens.
        recompute: None, "selective" (the attention itself) or "full" (the layer; its input is kept).
        distribute_saved: each tensor rank keeps its share of the input that full recomputation saves.
        fused_attention: the kernel keeps no s x s matrix.
        attention_dropout, hidden_dropout: whether there is one; a mask takes one byte a value.
        width: bytes of a value, 2 in 16-bit training.
    """
    f = 4 * h if f is None else f
    a = h if projection is None else projection
    tokens = s * b
    if recompute == "full":
        return width * tokens * h // (t if sequence_parallel or distribute_saved else 1)
    # the inputs of two norms, the inputs of two column-parallel matrices, two masks
    replicated = tokens * h * (4 * width + (2 if hidden_dropout else 0))
    # queries, keys and values, what attention gives, and the GELU's input and output
    split = tokens * width * (4 * a + 2 * f)
    if not fused_attention and recompute is None:
        split += n * s * tokens * (2 * width + 1 if attention_dropout else width)
    return replicated // (t if sequence_parallel else 1) + split // t
