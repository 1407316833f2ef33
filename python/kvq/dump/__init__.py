"""From a Hugging Face model and text to a kvq-dump file (formats/dump.md): `python -m kvq.dump`.

Read in this order:

    options.py     the command line
    program.py     from arguments to a dump that was checked
    families.py    which models are known, and what each one's RoPE does to its channels
    records.py     files, JSONL, chats, data sets -> tokens
    prompts.py     tokens -> sequences
    model.py       folder or hub id -> model, tokenizer, fingerprint
    placement.py   devices, and what quantized checkpoints need
    estimate.py    size, time and memory before the run
    disk.py        room on the disk
    survey.py      one short pass -> the anatomy of each attention layer
    anatomy.py     how a layer makes q and k from the output of its projections
    rounding.py    how far redone numbers may be from a model's
    softmax.py     attention with soft caps and learned sinks
    capture.py     a forward pass -> the q, k, v that enter attention
    writer.py      q, k, v -> HDF5
    validators.py  the finished file -> one line per check
    curvature.py   optional: the loss gradient at each head's attention output

Dumps without a forward pass, through array_writer.py:

    convert_oscar.py, oscar.py, rope_config.py   a dump of OSCAR's serving fork -> a kvq dump
    make_synthetic.py, synthetic.py              activations with a planted structure, for tests

In comments `T` is tokens, `Hq` query heads, `Hkv` key/value heads, `D` the head dimension of q and k, `Dv` that of v.
"""

__version__ = "1.0"
