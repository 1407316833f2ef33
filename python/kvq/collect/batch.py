"""Several sequences in one forward pass.

Shorter sequences are padded on the right, where attention that looks back never sees the padding; what comes of it is
thrown away. So no mask is needed, and no token of a sequence depends on its neighbours in the batch, up to the rounding
of products of another shape.
"""

import torch

from ..dump.capture import Recorder
from ..dump.forward import positions_of, run_text
from ..dump.placement import input_device

PADDING = 0  # any token will do


class BatchRecorder(Recorder):
    """A Recorder that also records passes over several sequences. `batch` has the first row and the length of each
    sequence of the next pass; None: the pass is over one sequence, as the Recorder expects."""

    batch: list[tuple[int, int]] | None = None

    def recorded_tokens(self, query) -> int:
        return sum(length for _, length in self.batch) if self.batch else super().recorded_tokens(query)

    def _record(self, module, query, key, value, output, kwargs) -> None:
        if self.batch is None:
            super()._record(module, query, key, value, output, kwargs)
            return
        for index, (row, length) in enumerate(self.batch):
            one = slice(index, index + 1)
            self.row = row
            inputs = (each[one, :, :length] for each in (query, key, value))
            super()._record(module, *inputs, output[one, :length], kwargs)

    def _keep_projected(self, layer: int, name: str):
        keep_one = super()._keep_projected(layer, name)

        def hook(module, inputs, output):  # output [B, n, channels]
            if self.batch is None:
                keep_one(module, inputs, output)
                return
            projected = output if isinstance(output, torch.Tensor) else output[0]
            for each, (row, length) in zip(projected, self.batch):
                self.witnesses[layer].keep(name, self.rows.projected, row, each[:length])

        return hook


@torch.no_grad()
def run_batch(text, recorder: BatchRecorder, sequences: list[list[int]], first_rows: list[int], stride: int) -> None:
    """One forward pass over several sequences, without a cache and without logits."""
    lengths = list(map(len, sequences))
    longest, device = max(lengths), input_device(text)
    ids = torch.tensor([tokens + [PADDING] * (longest - len(tokens)) for tokens in sequences], device=device)
    recorder.batch, recorder.row = list(zip(first_rows, lengths)), first_rows[0]
    run_text(text, ids, positions_of(0, longest, stride, device).expand(len(sequences), -1))
    recorder.batch = recorder.row = None
