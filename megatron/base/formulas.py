"""The formulas of the papers, each written once: parameters and floating-point operations of a transformer.

Letters: `B` global batch (samples), `s` sequence, `l` layers, `h` hidden, `f` ffn size, `V` vocabulary.
"""


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """`vocab_size` rounded up to a multiple of `divisible_by * tensor_parallel_size`."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def layer_parameters(h: int, f: int | None = None, projection: int | None = None) -> int:
    """Parameters of one transformer layer: two norms, attention and MLP, with all biases.

    `f` is the inner size of the MLP (default 4h), `projection` heads times head size (default h). At the defaults this
    is `12 h^2 + 13 h` (arXiv:2104.04473, section 3, per layer).
    """
    f = 4 * h if f is None else f
    a = h if projection is None else projection
    attention = (3 * a * h + 3 * a) + (a * h + h)
    mlp = (f * h + f) + (h * f + h)
    return attention + mlp + 2 * (2 * h)


def gpt_parameters(
    l: int,
    h: int,
    V: int,
    positions: int,
    f: int | None = None,
    projection: int | None = None,
    final_norm: bool = True,
    untied: bool = False,
) -> int:
    """Parameters of a GPT with learned positions, exactly; with `untied` output weights there are V h more.

    The published `12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h))` (arXiv:2104.04473, equation 2) leaves out the 2h of the
    final norm, which is counted here unless `final_norm` is false.
    """
    vocabularies = 2 if untied else 1
    return l * layer_parameters(h, f, projection) + (vocabularies * V + positions) * h + (2 * h if final_norm else 0)


def bert_parameters(
    l: int,
    h: int,
    V: int,
    positions: int,
    f: int | None = None,
    projection: int | None = None,
    *,
    binary_head: bool = True,
    untied: bool = False,
) -> int:
    """Parameters of a BERT with the heads of pretraining, exactly.

    Beside those of a GPT of these sizes, whose final norm a post-norm model has after its embeddings: the masked-LM
    head `h^2 + 3h + V`, and with a binary head its pooler `h^2 + h`, its two classes `2h + 2` and two token types `2h`.
    """
    common = gpt_parameters(l, h, V, positions, f, projection, untied=untied)
    pairs = (h * h + h) + (2 * h + 2) + 2 * h if binary_head else 0
    return common + (h * h + h) + 2 * h + V + pairs


def bert_head_flops(s: int, h: int, *, binary_head: bool = True) -> int:
    """Floating-point operations of one sample's forward pass through a BERT's heads, but for the logits of its tokens.

    The dense layer of the masked-LM head for every token and, with a binary head, the pooler and two classes.
    """
    return 2 * s * h * h + (2 * h * h + 4 * h if binary_head else 0)


def layer_forward_flops(s: int, h: int, f: int | None = None, projection: int | None = None) -> int:
    """Floating-point operations of one layer's forward pass over one sequence; a multiply-add counts two.

    At the defaults `24 s h^2 + 4 s^2 h` (arXiv:2104.04473, appendix): the products with the four matrices, and the
    scores and their product with the values (counted in full, causal or not, as the paper does).
    """
    f = 4 * h if f is None else f
    a = h if projection is None else projection
    return 2 * s * (4 * a * h + 2 * f * h) + 4 * s * s * a


def model_flops(
    B: int,
    s: int,
    l: int,
    h: int,
    V: int,
    f: int | None = None,
    projection: int | None = None,
) -> int:
    """Floating-point operations that the model needs for one iteration, forward and backward, nothing recomputed.

    At the defaults `72 B s l h^2 (1 + s/(6h) + V/(12 l h))` (arXiv:2104.04473, equation 3 without recomputation).
    The backward pass counts twice the forward.
    """
    return 3 * B * (l * layer_forward_flops(s, h, f, projection) + 2 * s * h * V)


def hardware_flops(
    B: int,
    s: int,
    l: int,
    h: int,
    V: int,
    f: int | None = None,
    projection: int | None = None,
    *,
    recompute_granularity: str | None = None,
    recomputed_layers: int | None = None,
    recomputed_logits: bool = False,
) -> int:
    """Floating-point operations that are executed for one iteration: `model_flops`, and the forward passes run again.

    Args:
        B, s, l, h, V, f, projection: as for `model_flops`.
        recompute_granularity: "full" for whole layers, "selective" for the weights of attention, None for nothing.
        recomputed_layers: how many of the l layers are recomputed, all if not given.
        recomputed_logits: whether the logits are computed again, as where the loss is taken in chunks of tokens; that
            is `2 s h V` a sample.

    With all layers in full, and the defaults, `96 B s l h^2 (1 + s/(6h) + V/(16 l h))` (arXiv:2104.04473, equation 3).
    "selective" repeats the product that gives the scores, `2 s^2 h` a layer and sample; the one with the values gives
    nothing that the backward pass needs, and is left out. (arXiv:2205.05198 counts `12 s^2 h` for it.) A fused kernel
    of attention repeats both, and what it computes again within its own backward pass is not counted.
    """
    recomputed = l if recomputed_layers is None else recomputed_layers
    if recompute_granularity == "full":
        again = layer_forward_flops(s, h, f, projection)
    elif recompute_granularity == "selective":
        again = 2 * s * s * (h if projection is None else projection)
    else:
        assert recompute_granularity is None
        again = 0
    logits = 2 * s * h * V if recomputed_logits else 0
    return model_flops(B, s, l, h, V, f, projection) + B * (recomputed * again + logits)
