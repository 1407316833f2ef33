"""Output curvature: how much the loss minds an error in each head's attention output.

For the summed next-token negative log-likelihood of a prompt, g[t, h] is its gradient at head h's attention output of
token t. `output_curvature` is the mean of g g^T over tokens: to second order, an error e in the output costs e^T G e.
"""

import numpy as np
import torch

from .anatomy import OUTPUT_PROJECTIONS, part_of
from .forward import decoder_of
from .placement import input_device
from .progress import Progress

# Number of tokens whose logits exist at once: with a vocabulary of 150k, logits of 4096 tokens take 2.4 GB.
LOSS_CHUNK_TOKENS = 256


class OutputCurvature:
    """Sums g g^T per head over sequences, with one forward and one backward pass each. Memory: the activations of one
    prompt."""

    def __init__(self, model, attention_modules: dict[int, torch.nn.Module], heads: dict[int, int], progress: Progress):
        self.model, self.attention_modules, self.heads = model, attention_modules, heads
        self.progress = progress
        self.sums: dict[int, torch.Tensor] = {}
        self.num_tokens = 0

    def add(self, tokens: list[int], stride: int) -> None:
        """Adds one whole sequence, generated tokens included."""
        hooks = [
            part_of(module, OUTPUT_PROJECTIONS).register_forward_pre_hook(self._watch_input(layer))
            for layer, module in self.attention_modules.items()
        ]
        try:
            self._backward(torch.tensor([tokens], device=input_device(self.model)), stride)
        finally:
            for hook in hooks:
                hook.remove()
        self.num_tokens += len(tokens)
        self.progress.advance(len(tokens))

    def result(self) -> dict[int, np.ndarray]:
        """layer -> float32 [Hq, Dv, Dv], symmetric, the mean over all tokens added."""
        return {layer: (total / self.num_tokens).float().numpy() for layer, total in self.sums.items()}

    def _watch_input(self, layer: int):
        """Hooks the input of the output projection, which is attention's output, to get its gradient."""

        def hook(_module, inputs):
            inputs[0].register_hook(lambda gradient: self._accumulate(layer, gradient))

        return hook

    def _accumulate(self, layer: int, gradient: torch.Tensor) -> None:
        """gradient [1, T, Hq * Dv]"""
        per_head = gradient[0].float().unflatten(-1, (self.heads[layer], -1)).transpose(0, 1)
        moment = (per_head.transpose(1, 2) @ per_head).double().cpu()
        self.sums[layer] = self.sums.get(layer, 0.0) + moment

    def _backward(self, ids: torch.Tensor, stride: int) -> None:
        # The weights do not require gradients. The embeddings do, so that autograd has a graph from the first layer on.
        embeddings = self.model.get_input_embeddings()(ids).detach().requires_grad_()
        positions = (torch.arange(ids.shape[1], device=ids.device) * stride).unsqueeze(0)
        hidden = decoder_of(self.model)(
            inputs_embeds=embeddings, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False
        ).last_hidden_state
        hidden.backward(self._loss_gradient(hidden.detach(), ids))

    def _loss_gradient(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Gradient of the summed NLL at the last hidden state [1, T, hidden], a chunk of logits at a time."""
        hidden = hidden.requires_grad_()
        targets = ids[0, 1:]
        for start in range(0, len(targets), LOSS_CHUNK_TOKENS):
            stop = min(start + LOSS_CHUNK_TOKENS, len(targets))
            logits = self._logits(hidden[0, start:stop])
            wanted = targets[start:stop].to(logits.device)
            torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum").backward()
        return hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.get_output_embeddings()(hidden)
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return softcap * torch.tanh(logits / softcap) if softcap else logits
