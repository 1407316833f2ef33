"""From a Hugging Face model and text to a statistics file (formats/stats.md), without a dump: `python -m kvq.collect`.

Texts, models and the capture of q, k and v are those of kvq.dump. Read in this order:

    options.py       the command line
    program.py       from arguments to a file that was checked
    token_plan.py    which tokens are held out, golden, counted: known from the lengths of the sequences
    batch.py         several sequences in one forward pass
    statistics.py    what the recorder writes to: rows of q, k, v -> layers
    layer.py         everything of one layer
    moments.py       sums of outer products
    attention.py     sums over the causal softmax, in panels
    sample.py        the tokens with the smallest keys
    content.py       the content hash of the dump that is never written
    checks.py        QK-norm, RoPE and attention redone by hand on some tokens
    stats_writer.py  manifest and container

In comments `T` is tokens, `Hq` query heads, `Hkv` key/value heads, `D` the head dimension of q and k, `Dv` that of v.
"""

__version__ = "1.0"
