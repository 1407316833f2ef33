"""The parts of `dump_qkv.py`: from a Hugging Face model and text to a kvq-dump file (formats/dump.md).

Read in this order:

    families.py    which models, and what each one's RoPE does to its channels
    prompts.py     text -> tokens -> sequences
    model.py       folder or hub id -> model, tokenizer, fingerprint
    capture.py     a forward pass -> the q, k, v that enter attention
    writer.py      q, k, v -> HDF5
    validators.py  the finished file -> one line per check
    curvature.py   optional: the loss gradient at each head's attention output

In comments `T` is tokens, `Hq` query heads, `Hkv` key/value heads, `D` the head dimension of q and k, `Dv` that of v.
"""

__version__ = "1.0"
